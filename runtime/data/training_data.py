"""The batches that a rank trains on, and the position among them, which a checkpoint saves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final, Literal, Protocol, runtime_checkable

from torch.utils.data import RandomSampler

from zeroir.errors import UserError
from zeroir.runtime.data.loader import IS_GLOBAL
from zeroir.runtime.training.users_code import in_users_code
from zeroir.torch_ops.batches import Batch

BatchFunction = Callable[..., Iterable[Batch]]
"""The user's ``batches(rank, world_size, seed, start_step=0)``; ``start_step`` may be missing."""

Resumption = Literal["new", "loader", "start-step", "replay"]
"""How data continues: it starts over, a loader loads its state, ``batches`` takes ``start_step``, or batches are
skipped."""

MOST_LEFT_OUT: Final = 1000
"""Batches that are left out in a row; more are no exception."""

_TAKEN: Final = "batches"
_LOADER: Final = "loader"


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that knows its position, such as ``zeroir.ResumableLoader`` or torchdata's ``StatefulDataLoader``.

    Its state belongs to one rank. If its key ``is_global`` is True, the state is the same on all ranks and valid for
    any number of them.
    """

    def state_dict(self) -> Mapping[str, object]:
        """Return the position after the batches taken so far."""

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Continue at that position with the next iterator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfData:
    """The rank that the batches are for: the first three arguments of the user's ``batches``."""

    rank: int
    world_size: int
    seed: int


class TrainingData:
    """The batches of one rank. ``function`` is the user's, and is called once, when the first batch is needed.

    If its result can be iterated again, like a list or a ``DataLoader``, it is iterated epoch after epoch; before each
    epoch but the first, ``set_epoch`` of a ``DataLoader``'s sampler is called if it exists. A generator ends, and so
    does the result of a function with ``start_step``, because that is the rest of the batches.

    The position counts the batches taken, not those that a loader has prefetched. Batches that ``takes`` refuses are
    left out, and counted in ``left_out``; None takes all.
    """

    def __init__(self, function: BatchFunction, rank: RankOfData) -> None:
        self.takes: Callable[[Batch], bool] | None = None
        self.left_out = 0
        self._function = function
        self._rank = rank
        self._taken = 0
        self._batches: Iterable[Batch] | None = None
        self._iterator: Iterator[Batch] | None = None

    @property
    def batches_taken(self) -> int:
        """The number of batches that this rank has taken, including those before a resume."""
        return self._taken

    def open(self) -> None:
        """Call the user's function now, unless it was called before.

        Raises:
            UserError: where it fails.
        """
        self._opened()

    def take(self, step: int) -> Batch:
        """Return the next batch that is not left out; ``step`` is the training step that needs it, for messages.

        Raises:
            UserError: where there is none, or too many in a row are left out.
        """
        for _ in range(MOST_LEFT_OUT):
            batch = self._next(step)
            if self.takes is None or self.takes(batch):
                return batch
            self.left_out += 1
        raise UserError(
            f"{MOST_LEFT_OUT:,} batches in a row before step {step} have sizes that the program does not take: compile "
            "for these."
        )

    def _next(self, step: int) -> Batch:
        iterator = self._opened()
        try:
            with in_users_code("batches()", f" at step {step}"):
                batch = next(iterator)
        except StopIteration:
            raise UserError(
                f"batches() ended before step {step}: yield for ever, return a DataLoader or a list, which begin "
                "again, or ask for fewer --steps."
            ) from None
        self._taken += 1
        return batch

    def first(self, count: int) -> Iterator[Batch]:
        """Yield so many batches, or fewer where they end; the position stays that before them.

        Raises:
            UserError: where the user's function fails.
        """
        iterator = self._opened()
        with in_users_code("batches()"):
            yield from islice(iterator, count)

    def state_dict(self) -> dict[str, object]:
        """Return the position: the number of batches taken, and the state of the loader if it has one.

        Raises:
            UserError: where the loader fails to return its state.
        """
        self._opened()
        batches: object = self._batches
        state: Mapping[str, object] | None = None
        if isinstance(batches, StatefulLoader):
            with in_users_code("state_dict() of the loader"):
                state = batches.state_dict()
        return {_TAKEN: self._taken, _LOADER: state}

    def load_state_dict(self, state: Mapping[str, object], world_size: int) -> Resumption:
        """Continue at a position that a rank of a job of ``world_size`` ranks has saved; return how.

        Raises:
            UserError: where these batches cannot continue there.
        """
        taken, loader_state = state.get(_TAKEN), state.get(_LOADER)
        if not isinstance(taken, int) or not isinstance(loader_state, Mapping | None):
            raise UserError(
                "The checkpoint does not say how far the data was: it was not saved by `zeroir run`."
            )
        if loader_state is not None:
            resumption = self._load_loader(loader_state, world_size)
        elif self._takes_start_step:
            resumption = self._start_at(taken)
        else:
            resumption = self._replay(taken, world_size)
        self._taken = taken
        return resumption

    def _opened(self) -> Iterator[Batch]:
        if self._iterator is None:
            self._batches = self._call(start_step=0)
            self._iterator = self._iterate(self._batches)
        return self._iterator

    def _load_loader(self, state: Mapping[str, object], world_size: int) -> Resumption:
        if state.get(IS_GLOBAL) is not True and world_size != self._rank.world_size:
            raise UserError(
                f"The loader of batches() has a position for each rank of {world_size}, so {self._rank.world_size} "
                f"cannot go on from it: use {world_size} ranks again, or return a zeroir.ResumableLoader, whose "
                "position serves any number."
            )
        batches = self._call(start_step=0)
        if not isinstance(batches, StatefulLoader):
            raise UserError(
                "The checkpoint has the state of a loader, but batches() returned a "
                f"{type(batches).__name__} without load_state_dict(): return the loader itself again."
            )
        with in_users_code("load_state_dict() of the loader"):
            batches.load_state_dict(state)
        self._batches, self._iterator = batches, self._iterate(batches)
        return "loader"

    def _start_at(self, taken: int) -> Resumption:
        self._batches = self._call(start_step=taken)
        _require_no_loader(self._batches, taken)
        self._iterator = self._iterate(self._batches)
        return "start-step"

    def _replay(self, taken: int, world_size: int) -> Resumption:
        if world_size != self._rank.world_size:
            raise UserError(
                f"batches() takes no start_step and gives other batches to each number of ranks, so "
                f"{self._rank.world_size} cannot go on where {world_size} stopped: use {world_size} ranks again, give "
                "it the parameter start_step, or let it return a zeroir.ResumableLoader."
            )
        self._batches = self._call(start_step=0)
        _require_no_loader(self._batches, taken)
        if taken and _is_shuffled_without_seed(self._batches):
            raise UserError(
                "batches() returned a DataLoader that shuffles without a generator, so its order is another one after "
                "each start: give it generator=torch.Generator().manual_seed(seed), or return a zeroir.ResumableLoader."
            )
        self._iterator = self._iterate(self._batches)
        with in_users_code("batches()", f" while {taken} batches were skipped"):
            skipped = sum(1 for _ in islice(self._iterator, taken))
        if skipped < taken:
            raise UserError(
                f"batches() ended after {skipped} batches, but {taken} had been taken when the checkpoint was saved: "
                "it must yield the same batches again."
            )
        return "replay"

    def _iterate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        with in_users_code("batches()"):
            iterator = iter(batches)
        is_single_use = iterator is batches or self._takes_start_step
        return iterator if is_single_use else _epochs(batches, iterator)

    @property
    def _takes_start_step(self) -> bool:
        """Whether the function has a parameter for the number of batches taken before."""
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):  # callables written in C
            return True
        positional = [each for each in parameters if each.kind in _POSITIONAL]
        return len(positional) > 3 or any(
            each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters
        )

    def _call(self, *, start_step: int) -> Iterable[Batch]:
        given: tuple[int, ...] = (self._rank.rank, self._rank.world_size, self._rank.seed)
        if self._takes_start_step:
            given = (*given, start_step)
        with in_users_code("batches()"):
            return self._function(*given)


def _epochs(batches: Iterable[Batch], first: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of ``first``, and then those of ``batches`` again and again, until an epoch is empty."""
    set_epoch = None
    if not isinstance(batches, StatefulLoader):
        set_epoch = getattr(getattr(batches, "sampler", None), "set_epoch", None)
    epoch, iterator = 0, first
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        epoch += 1
        if set_epoch is not None:
            set_epoch(epoch)
        iterator = iter(batches)


_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def _require_no_loader(batches: Iterable[Batch], taken: int) -> None:
    if taken and isinstance(batches, StatefulLoader):
        raise UserError(
            "batches() returned a loader with load_state_dict(), but the checkpoint has no state of a loader: "
            "return what it returned when the checkpoint was saved."
        )


def _is_shuffled_without_seed(batches: Iterable[Batch]) -> bool:
    """Return whether torch's global generator, which is not seeded, decides the order of a loader."""
    sampler = getattr(batches, "sampler", None)
    return isinstance(sampler, RandomSampler) and sampler.generator is None


def repeated(batch: Callable[[], Batch]) -> BatchFunction:
    """Return the batches of a model file without ``batches``: its example, over and over."""

    def batches(_rank: int, _world_size: int, _seed: int, _start_step: int) -> Iterator[Batch]:
        return repeat(batch())

    return batches
