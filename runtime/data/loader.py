"""A loader whose batches are a pure function of a seed and a position: resumable anywhere, with any number of ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from zeroir.errors import UserError
from zeroir.runtime.data.sample_order import SampleOrder
from zeroir.runtime.training.random_states import host_generators_kept, seed_host_generators
from zeroir.torch_ops.batches import Batch

IS_GLOBAL: Final = "is_global"
"""The key of a loader's state that is True where the state is the same on all ranks and valid for any number of them.
"""

Sample = TypeVar("Sample")
Sample_co = TypeVar("Sample_co", covariant=True)


class SizedDataset(Protocol[Sample_co]):
    """A data set with indexed samples, such as a map-style ``torch.utils.data.Dataset`` or a list."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Sample_co:
        """Return the sample with this index, from 0."""


class ResumableLoader(Generic[Sample]):
    """An endless iterator over the batches of one rank; its state is the number of samples that all ranks have taken.

    The global order of samples depends on ``seed`` alone. Each epoch is a new permutation of the data set (or the data
    set in its own order, without ``shuffle``), and a batch may extend into the next epoch, so no sample is ever
    dropped. Of each ``batch_size · world_size`` samples, rank r takes the r-th ``batch_size``. A job with another
    number of ranks continues in the same order.

    Python's, numpy's and torch's global generators are seeded anew for each sample, and for ``collate``, so that random
    transformations are the same for any number of workers and after any resume.

    ``dataset`` has a length and indexed samples. ``collate`` makes a batch of a list of samples; the default stacks
    tensors as torch's ``DataLoader`` does, but makes a tuple of samples that are tuples. ``num_workers``,
    ``prefetch_factor`` and ``pin_memory`` are those of ``DataLoader``.

    Raises:
        UserError: where a number is out of its range, or the data set is empty or has no length.
    """

    def __init__(
        self,
        dataset: SizedDataset[Sample],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Sample]], Batch] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, but must be at least 1.")
        if not 0 <= rank < world_size:
            raise UserError(
                f"rank is {rank}, but must be from 0 to {world_size - 1} (world_size - 1)."
            )
        self._order = SampleOrder(size=_size(dataset), seed=seed, is_shuffled=shuffle)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._batches = _BatchesByPlace(dataset=dataset, order=self._order, collate=collate)
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._samples = 0
        self._iterations = 0

    @property
    def samples(self) -> int:
        """The number of samples that all ranks have taken together, without those that workers have prefetched."""
        return self._samples

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._samples // self._order.size

    def state_dict(self) -> dict[str, object]:
        """Return the position: the next batch starts at sample ``samples`` of the global order.

        It is equal on all ranks.
        """
        return {
            IS_GLOBAL: True,
            "samples": self._samples,
            "epoch": self.epoch,
            "size": self._order.size,
            "seed": self._order.seed,
            "shuffle": self._order.is_shuffled,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the position of ``state``; iterators made before are invalid.

        Raises:
            UserError: where the state is of another order of samples.
        """
        own = self.state_dict()
        for key, what in _IDENTITY.items():
            if state.get(key) != own[key]:
                raise UserError(
                    f"The position of the data belongs to {what} {state.get(key)}, but the loader has {own[key]}: "
                    "make the loader with the same data, seed and shuffle."
                )
        samples = state.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise UserError(
                f"The position of the data is {samples!r}, but must be a number of samples."
            )
        self._samples = samples
        self._iterations += 1

    def __iter__(self) -> Iterator[Batch]:
        """Return an endless iterator over this rank's batches, from the current position on.

        Raises:
            UserError: where a sample or ``collate`` fails, or where another iterator was made since.
        """
        self._iterations += 1
        return self._iterate(self._iterations)

    def _iterate(self, iteration: int) -> Iterator[Batch]:
        places = _Places(
            start=self._samples + self._rank * self._batch_size,
            batch_size=self._batch_size,
            stride=self._world_size * self._batch_size,
        )
        loader: DataLoader[object] = DataLoader(
            self._batches,
            batch_size=None,
            sampler=places,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=_leave_process_group if self._num_workers else None,
            # Without a generator each iterator would draw from the global one.
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if iteration != self._iterations:
                raise UserError(
                    "This iterator of a ResumableLoader is out of date, because another one was made or a state was "
                    "loaded since: go on with the latest."
                )
            if isinstance(batch, _Failure):
                raise UserError(batch.sentence)
            self._samples += places.stride
            yield batch


_IDENTITY: Final = {
    "size": "a data set of size",
    "seed": "the seed",
    "shuffle": "an order with shuffle =",
}
"""The keys that must be equal for a position to mean the same, and their names in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A sentence on an exception in the user's code, which a worker returns instead of a batch.

    The exception itself would reach the main process with the worker's traceback as its text.
    """

    sentence: str


class _Explained:
    """Turns an exception of the block into a ``_Failure``; ``what`` says what the block does."""

    def __init__(self) -> None:
        self.what = ""
        self.failure: _Failure | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.failure = _Failure(sentence=_sentence(self.what, error))
        return self.failure is not None


class _Places(Sampler[tuple[int, int]]):
    """An endless iterator over the positions [start, stop) of a rank's batches in the stream of samples."""

    def __init__(self, *, start: int, batch_size: int, stride: int) -> None:
        self._start = start
        self._batch_size = batch_size
        self.stride = stride

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start = self._start
        while True:
            yield start, start + self._batch_size
            start += self.stride


class _BatchesByPlace(Dataset[object], Generic[Sample]):
    """A data set of whole batches, indexed by their positions in the stream of samples."""

    def __init__(
        self,
        *,
        dataset: SizedDataset[Sample],
        order: SampleOrder,
        collate: Callable[[list[Sample]], Batch] | None,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._collate = collate

    def __getitem__(self, place: tuple[int, int]) -> object:
        """Return the batch of these positions, or a ``_Failure``."""
        start, stop = place
        samples: list[Sample] = []
        explained = _Explained()
        with host_generators_kept(), explained:
            for position, index in enumerate(self._order.indices(start, stop), start):
                explained.what = f"Sample {index} of the data set"
                seed_host_generators(self._order.sample_seed(position, index))
                samples.append(self._dataset[index])
            explained.what = "The collation of a batch"
            seed_host_generators(self._order.batch_seed(start))
            return self._collate(samples) if self._collate else _stacked(samples)
        return explained.failure


def _stacked(samples: Sequence[object]) -> Batch:
    """Collate samples as torch does, but make a tuple of samples that are tuples."""
    batch: object = default_collate(list(samples))
    if isinstance(batch, list) and isinstance(samples[0], tuple):
        return tuple(batch)
    return batch


def _sentence(what: str, error: Exception) -> str:
    # The frame below the loader's is the user's; deeper ones may belong to a library.
    frames = traceback.extract_tb(error.__traceback__)[1:2]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    reason = " ".join(str(error).split())
    return f"{what} failed{place}: {type(error).__name__}" + (f": {reason}" if reason else "")


def _size(dataset: object) -> int:
    try:
        size = len(cast("SizedDataset[object]", dataset))
    except TypeError:
        raise UserError(
            f"The data set of type {type(dataset).__name__} has no length: a ResumableLoader needs numbered samples; "
            "give a loader of your own with state_dict() and load_state_dict() otherwise."
        ) from None
    if size < 1:
        raise UserError("The data set is empty: give at least one sample.")
    return size


def _leave_process_group(_worker: int) -> None:
    """Leave the rank's process group: torchrun sends SIGTERM to the whole group, and the rank still needs data then."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _unchanged(batch: object) -> object:
    return batch
