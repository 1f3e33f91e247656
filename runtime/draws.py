"""The random numbers of a construction, drawn later: each draw once, in its order, or passed over if nobody needs it.

A draw depends on the state that all draws before it left the generator in. While a model is built its draws are only
noted, and torch's generator is given a made-up state after each, a *ticket*, that stands for the one it would have.
Whoever saves a state and sets it again (``torch.random.fork_rng``) handles tickets and need not know; a seed set by
the model begins a new line of draws. A state that is neither is one that nobody can account for, and raises.

Passing over a draw means moving the generator on by as many words as it takes, which is cheaper than making numbers of
them. How many words an operator takes is found by trying it, so a torch that draws otherwise is only slower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

_aten = torch.ops.aten

# The seed of tickets; any will do.
_TICKET_SEED: Final = 0x7A65726F6972
# Where a generator's state has the seed, which a ticket leaves alone: a model may ask for it.
_SEED_BYTES: Final = 8
# A state is 5 kB: one is kept every so many words, so that going back costs little.
_KEPT_EVERY: Final = 1 << 16
_CHUNK_NUMEL: Final = 1 << 15
_FILLING: Final = frozenset({_aten.uniform_.default, _aten.normal_.default})
# Shorter tensors are drawn in another way.
_PASSABLE_NUMEL: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """An operator that draws, to be carried out on scratch memory with a generator.

    ``filled_numel`` elements of ``dtype`` in a row are what it fills in place, if that is all that it does.
    """

    function: torch._ops.OpOverload
    run: Callable[[torch.Generator], object]
    dtype: torch.dtype | None = None
    filled_numel: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Moment:
    """The generator between two draws. Its state is known, or follows from a draw at another moment."""

    state: Tensor | None = None
    before: Moment | None = None
    draw: Draw | None = None


@dataclass(slots=True)
class Draws:
    """The moments of torch's default generator through a construction, and a generator of its own to go along them.

    With ``is_strict`` a state of unknown origin raises RuntimeError; otherwise it is taken for what it is.
    """

    is_strict: bool = True
    _moments: dict[bytes, Moment] = field(default_factory=dict)
    _tickets: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(_TICKET_SEED)
    )
    _generator: torch.Generator = field(default_factory=torch.Generator)
    _at: Moment | None = None
    _words_since_kept: int = 0
    _laws: dict[tuple[torch._ops.OpOverload, torch.dtype], _Law | None] = field(
        default_factory=dict
    )

    def begin(self) -> None:
        """Take the state of torch's generator for what it is."""
        self._register(Moment(state=torch.get_rng_state()), torch.get_rng_state())

    def now(self) -> Moment:
        """Where torch's generator stands, or would if all draws had been carried out.

        Raises:
            RuntimeError: where that cannot be known.
        """
        state = torch.get_rng_state()
        found = self._moments.get(_digest(state))
        if found is not None:
            return found
        seeded = torch.Generator().manual_seed(torch.initial_seed()).get_state()
        if self.is_strict and not torch.equal(state, seeded):
            raise RuntimeError("the model sets a state of torch's generator that is not known")
        moment = Moment(state=state)
        self._register(moment, state)
        return moment

    def postpone(self, before: Moment, draw: Draw) -> Moment:
        """The moment after a draw that is not carried out; torch's generator gets the ticket that stands for it."""
        after = Moment(before=before, draw=draw)
        _one(torch.uint8).random_(generator=self._tickets)
        ticket = self._tickets.get_state()
        ticket[:_SEED_BYTES] = torch.get_rng_state()[:_SEED_BYTES]
        torch.set_rng_state(ticket)
        self._register(after, ticket)
        return after

    def settle(self, moment: Moment) -> None:
        """Give torch's generator the state that it really has at a moment."""
        moment.state = self._reach(moment).get_state()
        torch.set_rng_state(moment.state)
        self._register(moment, moment.state)

    def carry_out(
        self, before: Moment, after: Moment | None, run: Callable[[torch.Generator], object]
    ) -> object:
        """Draw at a moment; ``after`` is the one that this leads to, if any other draw follows."""
        generator = self._reach(before)
        self._at = None
        result = run(generator)
        self._at = after
        if after is not None and after.draw is not None:
            self._keep(after, after.draw.filled_numel or _KEPT_EVERY)
        return result

    def _register(self, moment: Moment, state: Tensor) -> None:
        self._moments[_digest(state)] = moment

    def _reach(self, moment: Moment) -> torch.Generator:
        """The generator at a moment, after the draws before it that were not carried out yet."""
        passed: list[tuple[Moment, Draw]] = []
        start = moment
        while start is not self._at and start.state is None:
            assert start.draw is not None
            assert start.before is not None
            passed.append((start, start.draw))
            start = start.before
        if start is not self._at:
            assert start.state is not None
            self._generator.set_state(start.state)
            self._words_since_kept = 0
        self._at = None
        for after, draw in reversed(passed):
            self._pass_over(draw)
            self._keep(after, draw.filled_numel or _KEPT_EVERY)
        self._at = moment
        return self._generator

    def _keep(self, moment: Moment, words: int) -> None:
        self._words_since_kept += words
        if self._words_since_kept >= _KEPT_EVERY and moment.state is None:
            moment.state = self._generator.get_state()
            self._words_since_kept = 0

    def _pass_over(self, draw: Draw) -> None:
        law = None
        if draw.dtype is not None and draw.filled_numel >= _PASSABLE_NUMEL:
            kind = (draw.function, draw.dtype)
            if kind not in self._laws:
                self._laws[kind] = _law(*kind)
            law = self._laws[kind]
        if law is None:
            draw.run(self._generator)
        else:
            advance(self._generator, law.words(draw.filled_numel))


def call(
    function: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    generator: torch.Generator,
) -> object:
    """Call an operator that draws, with a generator in place of torch's own."""
    if any(argument.name == "generator" for argument in function._schema.arguments):
        return function(*args, **{**kwargs, "generator": generator})
    own = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        result: object = function(*args, **kwargs)
        generator.set_state(torch.get_rng_state())
    finally:
        torch.set_rng_state(own)
    return result


def advance(generator: torch.Generator, words: int) -> None:
    """Move a generator on by so many words of 32 bits."""
    pairs, odd = divmod(words, 2)
    # Two words an element, in a piece of memory that stays in the cache.
    chunk = torch.empty(min(pairs, _CHUNK_NUMEL), dtype=torch.int64, device="cpu")
    while pairs:
        count = min(pairs, _CHUNK_NUMEL)
        chunk[:count].random_(generator=generator)
        pairs -= count
    if odd:
        _one(torch.uint8).random_(generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """How many words an operator takes to fill a tensor; what is left over after sixteens may be drawn once more."""

    per_element: int
    for_rest: int

    def words(self, numel: int) -> int:
        return self.per_element * numel + (self.for_rest if numel % 16 else 0)


_LAWS: Final = tuple(
    _Law(per_element=words, for_rest=rest * words) for words in (1, 2) for rest in (0, 16)
)


def _law(function: torch._ops.OpOverload, dtype: torch.dtype) -> _Law | None:
    """What an operator keeps to, as far as trying shows."""
    if function not in _FILLING:
        return None
    for law in _LAWS:
        if all(_holds(law, function, dtype, numel) for numel in (_PASSABLE_NUMEL, 4096, 4099)):
            return law
    return None


def _holds(law: _Law, function: torch._ops.OpOverload, dtype: torch.dtype, numel: int) -> bool:
    drawn, moved = torch.Generator(), torch.Generator()
    for generator in (drawn, moved):
        generator.manual_seed(1)
        torch.empty(1, dtype=torch.float32).normal_(
            generator=generator
        )  # leaves half a pair behind
    function(torch.empty(numel, dtype=dtype, device="cpu"), generator=drawn)
    advance(moved, law.words(numel))
    return torch.equal(drawn.get_state(), moved.get_state())


def _one(dtype: torch.dtype) -> Tensor:
    return torch.empty(1, dtype=dtype, device="cpu")


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
