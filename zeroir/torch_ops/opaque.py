"""Opaque calls: modules whose code runs as it is within a program, because it cannot be traced.

To a program such a call is one operator: a function of the tensors that the module is called with, of its parameters
and buffers, of a seed, and of sizes that depend on those of the batch: its arguments', then its results'. It calls the
module's forward in eager PyTorch. Its backward is another operator. It calls the forward once more and differentiates
it, as an activation checkpoint does. So nothing but the arguments stays between the two, and these may be recomputed,
offloaded and gathered as those of any operator. All random numbers of the call depend on its seed, so both calls draw
the same.

A program names the call by a word, and the process that captured the module knows it by that word.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.ir.segments.allowlist import OPAQUE_OPS
from zeroir.ir.segments.segment import Segment
from zeroir.torch_ops.define import define, fake

_MULTIPLIER: Final = 6364136223846793005
_INCREMENT: Final = 1442695040888963407
"""Of Knuth's linear congruential generator MMIX, modulo 2^64."""


class OpaqueCall(Protocol):
    """A call of a module at one place of a model. ``path`` is the module's name in the model.

    ``reason`` says why its code cannot be traced; it is empty where the user chose it.

    ``differentiated`` are the positions of the results that have a gradient, and ``trained`` of the inputs.
    """

    @property
    def path(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def own_code(self) -> str:
        """What the code is called that runs around modules which the program computes; empty if it is a module's."""
        ...

    @property
    def differentiated(self) -> Sequence[int]: ...

    @property
    def trained(self) -> Sequence[int]: ...

    @property
    def kind(self) -> str:
        """A word that calls share which run the code of one class on arguments of the same types."""
        ...

    @property
    def workspaces(self) -> tuple[int, int] | None:
        """The bytes that are planned for the forward and the backward beside operands and results, None if unknown."""
        ...

    @property
    def is_measured(self) -> bool:
        """Whether the memory of its first run is compared with what is planned."""
        ...

    def line_here(self) -> str:
        """Return ``file:line`` of the user's code that runs in this thread; empty if there is none."""
        ...

    def take_failure(self) -> UserError | None:
        """Return, and forget, the failure of code whose step is discarded: such a call does not raise it."""
        ...

    def on(self, model: nn.Module) -> OpaqueCall:
        """Return the same call, whose code is that of another model's module."""
        ...

    def empty_results(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return tensors like the results, for a trace."""
        ...

    def run(self, inputs: Sequence[Tensor], seed: int, sizes: Sequence[int]) -> list[Tensor]:
        """Return the results."""
        ...

    def gradients(
        self,
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        seed: int,
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """Return the gradients of the inputs ``trained``, from those of the results ``differentiated``."""
        ...


_CALLS: Final[dict[str, OpaqueCall]] = {}
"""The calls that this process knows. Like torch's registries of operators, this one is global."""


def register_call(word: str, call: OpaqueCall) -> None:
    """Let this process know a call by a word; a later call replaces it."""
    _CALLS[word] = call


def opaque_call(word: str) -> OpaqueCall:
    """Return a call that this process knows.

    Raises:
        UserError: if it does not know it, because it did not capture the model.
    """
    try:
        return _CALLS[word]
    except KeyError:
        raise UserError(not_here(word)) from None


def not_here(word: str) -> str:
    """Return the sentence on an opaque call that this process does not know."""
    return (
        f"The program calls the code of a module as it is ({word}), which this process does not have: give the model "
        "that it was compiled from."
    )


def run_in(model: nn.Module, words: Iterable[str]) -> None:
    """Let calls run the code of the modules of another model, which was built by the same code."""
    for word in words:
        _CALLS[word] = opaque_call(word).on(model)


def planned_bytes(op: str, word: str) -> int | None:
    """Return the bytes that are planned for a call of the operator beside its operands and results, if known."""
    workspaces = opaque_call(word).workspaces
    return None if workspaces is None else workspaces[OPAQUE_OPS.index(op)]


def words_of(segments: Iterable[Segment]) -> frozenset[str]:
    """Return the words of the opaque calls in segments."""
    nodes = (node for segment in segments for node in segment.nodes if node.op in OPAQUE_OPS)
    return frozenset(word for node in nodes if isinstance(word := node.args[-1], str))


class KnownModule(NamedTuple):
    """An opaque module by its name, or other code by what it is called, and why it cannot be traced.

    The bytes are those of its forward and backward, if they were measured.
    """

    path: str
    reason: str
    forward_bytes: int | None
    backward_bytes: int | None


def known_modules(segments: Iterable[Segment]) -> dict[str, KnownModule]:
    """Return the module of each opaque call in segments that this process knows, by its word."""
    known = (word for word in sorted(words_of(segments)) if word in _CALLS)
    return {
        word: KnownModule(
            _CALLS[word].own_code or _CALLS[word].path,
            _CALLS[word].reason,
            _MEASURED.get((word, False)),
            _MEASURED.get((word, True)),
        )
        for word in known
    }


def opaque_modules(segments: Iterable[Segment]) -> dict[str, str]:
    """Return the names of the modules whose code runs as it is in segments, and why it cannot be traced."""
    calls = (opaque_call(word) for word in sorted(words_of(segments)))
    return {call.path: call.reason for call in calls if not call.own_code}


def taken_failure(segments: Iterable[Segment]) -> UserError | None:
    """Return, and forget, a failure of the code that runs as it is in segments."""
    failures = [opaque_call(word).take_failure() for word in sorted(words_of(segments))]
    return next((failure for failure in failures if failure is not None), None)


def unknown_words(segments: Iterable[Segment]) -> list[str]:
    """Return the words of opaque calls that this process does not know."""
    return sorted(words_of(segments) - _CALLS.keys())


Observer = Callable[[Callable[[], list[Tensor]]], list[Tensor]]
"""Makes a call, and returns its results."""

_OBSERVERS: Final[dict[tuple[str, bool], Observer]] = {}


def observe_next(word: str, observer: Observer, *, is_backward: bool) -> None:
    """Let an observer make the next call of the forward, or of the backward, that this word names."""
    _OBSERVERS[word, is_backward] = observer


_MEASURED: Final[dict[tuple[str, bool], int]] = {}


def note_bytes(word: str, size_bytes: int, *, is_backward: bool) -> None:
    """Note what a call held beside its operands and results."""
    _MEASURED[word, is_backward] = size_bytes


Seen = Callable[[OpaqueCall, Callable[[], list[Tensor]]], list[Tensor]]
"""Makes a call of this module, and returns its results."""

_SEEN: Final[list[Seen]] = []


@contextmanager
def seen(look: Seen) -> Iterator[None]:
    """Let ``look`` make the calls of the block."""
    _SEEN.append(look)
    try:
        yield
    finally:
        _SEEN.remove(look)


def _observed(word: str, call: Callable[[], list[Tensor]], *, is_backward: bool) -> list[Tensor]:
    for look in _SEEN:
        call = partial(look, opaque_call(word), call)
    observer = _OBSERVERS.pop((word, is_backward), None)
    return call() if observer is None else observer(call)


def run_opaque(
    inputs: Sequence[Tensor], seed: Tensor, sizes: Sequence[int], word: str
) -> list[Tensor]:
    """Return the results of an opaque call; ``seed`` is i64[1]."""
    call = partial(opaque_call(word).run, inputs, int(seed), sizes)
    return _observed(word, call, is_backward=False)


def run_opaque_backward(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seed: Tensor,
    sizes: Sequence[int],
    word: str,
) -> list[Tensor]:
    """Return the gradients of an opaque call's trained inputs."""
    call = partial(opaque_call(word).gradients, gradients, inputs, int(seed), sizes)
    return _observed(word, call, is_backward=True)


opaque = define("zeroir::opaque", run_opaque)
opaque_backward = define("zeroir::opaque_backward", run_opaque_backward)


@fake("zeroir::opaque")
def _(inputs: Sequence[Tensor], _: Tensor, sizes: Sequence[int], word: str) -> list[Tensor]:
    return opaque_call(word).empty_results(inputs, sizes)


@fake("zeroir::opaque_backward")
def _(
    _: Sequence[Tensor], inputs: Sequence[Tensor], __: Tensor, ___: Sequence[int], word: str
) -> list[Tensor]:
    return [torch.empty_like(inputs[number]) for number in opaque_call(word).trained]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:  # noqa: ANN401 - torch's
    tensors, seed, ctx.sizes, ctx.word = inputs
    call = opaque_call(ctx.word)
    ctx.save_for_backward(*tensors, seed)
    differentiated = set(call.differentiated)
    ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in differentiated))


def _differentiated(ctx: Any, grads: Sequence[Tensor]) -> tuple[object, ...]:  # noqa: ANN401 - torch's
    *inputs, seed = cast("tuple[Tensor, ...]", ctx.saved_tensors)
    call = opaque_call(ctx.word)
    given = [grads[number] for number in call.differentiated]
    results: list[Tensor | None] = [None] * len(inputs)
    made = opaque_backward(given, inputs, seed, ctx.sizes, ctx.word)
    for number, gradient in zip(call.trained, made, strict=True):
        results[number] = gradient
    # Torch takes an empty list for one of tensors.
    return results, None, None if ctx.sizes else [], None


torch.library.register_autograd("zeroir::opaque", _differentiated, setup_context=_set_up)


def seed_of_site(seed: int, site: int) -> int:
    """Return the seed of a random operator within an opaque call, in [0, 2^63)."""
    return ((seed ^ (site * _INCREMENT)) * _MULTIPLIER + _INCREMENT) % 2**63


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch's CPU within the block, and restore them after it."""
    python, plain = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    legacy: Mapping[str, object] | None = (
        None if numpy is None else numpy.random.get_state(legacy=False)
    )
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(plain)
        if numpy is not None:
            numpy.random.set_state(legacy)
