"""``ResumableLoader``: the order is that of all ranks together, and nothing depends on workers or resumes."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice, repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeroir
from zeroir.errors import UserError
from zeroir.runtime.data.loader import SizedDataset
from zeroir.runtime.data.sample_order import SampleOrder
from zeroir.runtime.training.random_states import seed_generators
from zeroir.torch_ops.batches import Batch

SIZE = 23


class Noisy:
    """Samples that draw from all three global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return torch.tensor(index), noise


def loader(
    rank: int = 0, world_size: int = 1, workers: int = 0, batch_size: int = 2
) -> zeroir.ResumableLoader[tuple[Tensor, Tensor]]:
    return zeroir.ResumableLoader(
        Noisy(),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=5,
        num_workers=workers,
    )


Taken = tuple[list[int], list[list[float]]]


def taken(batches: Iterator[Batch], count: int) -> list[Taken]:
    """The next batches as plain numbers."""
    numbers = []
    for batch in islice(batches, count):
        assert isinstance(batch, tuple)
        indices, noise = batch
        numbers.append((indices.tolist(), noise.tolist()))
    return numbers


def stream(world_size: int, steps: int, batch_size: int = 2) -> list[tuple[int, list[float]]]:
    """All samples that the ranks of a job take, in the global order."""
    ranks = [
        taken(iter(loader(rank, world_size, batch_size=batch_size)), steps)
        for rank in range(world_size)
    ]
    return in_order(ranks)


def in_order(ranks: list[list[Taken]]) -> list[tuple[int, list[float]]]:
    """The samples of some steps of all ranks, in the global order."""
    return [
        sample
        for step in zip(*ranks, strict=True)
        for own in step
        for sample in zip(*own, strict=True)
    ]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 2), (3, 2), (1, 6), (4, 3)])
def test_the_global_order_is_the_same_for_any_job(world_size: int, batch_size: int) -> None:
    """Samples and their random numbers, beyond the end of the second epoch; epochs do not end with a batch."""
    steps = 60 // (world_size * batch_size)
    assert stream(world_size, steps, batch_size) == stream(1, 30)[: steps * world_size * batch_size]


def test_no_sample_is_left_out() -> None:
    samples = [index for index, _ in stream(3, 12)]
    assert len(samples) == 72
    for epoch in range(3):
        assert sorted(samples[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))
    assert samples[:SIZE] != samples[SIZE : 2 * SIZE]


def test_workers_change_nothing() -> None:
    assert taken(iter(loader(1, 2, workers=2)), 8) == taken(iter(loader(1, 2)), 8)


@pytest.mark.slow
def test_three_resumes_within_an_epoch_with_workers() -> None:
    """The position is that of the batches taken, whatever the workers have made ready."""
    whole = taken(iter(loader(0, 2, workers=2)), 9)
    state = loader(0, 2).state_dict()
    resumed = []
    for count in (2, 1, 4, 2):
        later = loader(0, 2, workers=2)
        later.load_state_dict(state)
        resumed += taken(iter(later), count)
        state = later.state_dict()
    assert resumed == whole
    assert state["samples"] == 9 * 4
    assert state["epoch"] == 1


def test_another_number_of_ranks_goes_on_in_the_order() -> None:
    first = [loader(rank, 3) for rank in range(3)]
    begun = [taken(iter(rank), 4) for rank in first]
    assert {str(rank.state_dict()) for rank in first} == {str(first[0].state_dict())}
    later = [loader(rank, 2) for rank in range(2)]
    for rank in later:
        rank.load_state_dict(first[0].state_dict())
    going_on = [taken(iter(rank), 3) for rank in later]
    assert [*in_order(begun), *in_order(going_on)] == stream(1, 18)


def test_the_random_numbers_of_the_process_are_its_own() -> None:
    drawn: list[list[tuple[float, float, float]]] = []
    for batches in (repeat(None), iter(loader())):
        seed_generators(1)
        draws = (
            (random.random(), float(np.random.rand()), float(torch.rand(())))
            for _ in islice(batches, 3)
        )
        drawn.append(list(draws))
    assert drawn[0] == drawn[1]


def test_collation_may_draw_random_numbers() -> None:
    def collate(samples: list[int]) -> Tensor:
        return torch.tensor(samples) + torch.rand(())

    def batches(workers: int, start: int) -> list[list[float]]:
        made = zeroir.ResumableLoader(
            list(range(SIZE)),
            batch_size=2,
            rank=0,
            world_size=1,
            collate=collate,
            num_workers=workers,
        )
        made.load_state_dict({**made.state_dict(), "samples": 2 * start})
        return [batch.tolist() for batch in islice(made, 4) if isinstance(batch, Tensor)]

    assert batches(0, 0)[2:] == batches(2, 2)[:2]
    assert len({batch[0] % 1 for batch in batches(0, 0)}) == 4


def test_samples_of_one_tensor_make_a_tensor() -> None:
    made = zeroir.ResumableLoader(
        torch.arange(4.0), batch_size=3, rank=0, world_size=1, shuffle=False
    )
    assert torch.equal(torch.as_tensor(next(iter(made))), torch.tensor([0.0, 1.0, 2.0]))


class Outside:
    """Tells whether the process that makes a sample is outside the process group of the one that made the data set."""

    def __init__(self) -> None:
        self.group = os.getpgid(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bool:
        return os.getpgid(0) != self.group


def test_workers_are_out_of_reach_of_signals_to_the_rank() -> None:
    """torchrun sends SIGTERM to the rank and all of its process group, and the rank goes on to the end of its step."""
    made = zeroir.ResumableLoader(Outside(), batch_size=1, rank=0, world_size=1, num_workers=1)
    assert next(iter(made)) == torch.tensor([True])


class Failing:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("no such picture\nat all")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers: int) -> None:
    made = zeroir.ResumableLoader(
        Failing(), batch_size=1, rank=0, world_size=1, shuffle=False, num_workers=workers
    )
    batches = iter(made)
    next(batches)
    next(batches)
    with pytest.raises(UserError) as caught:
        next(batches)
    assert "Sample 2 of the data set failed (test_resumable_loader.py:" in str(caught.value)
    assert str(caught.value).endswith("ValueError: no such picture at all")
    assert made.samples == 2


def test_an_old_iterator_is_refused() -> None:
    made = loader()
    old = iter(made)
    next(old)
    made.load_state_dict(made.state_dict())
    with pytest.raises(UserError, match="out of date"):
        next(old)
    assert made.samples == 2


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"seed": 6}, "belongs to the seed 6, but the loader has 5"),
        ({"size": 24}, "belongs to a data set of size 24, but the loader has 23"),
        ({"shuffle": False}, "belongs to an order with shuffle = False, but the loader has True"),
        ({"samples": -1}, "is -1, but must be a number of samples"),
        ({"samples": None}, "is None, but must be a number of samples"),
    ],
)
def test_a_position_in_another_order_is_refused(state: dict[str, object], sentence: str) -> None:
    made = loader()
    with pytest.raises(UserError, match=sentence):
        made.load_state_dict({**made.state_dict(), "samples": 4, **state})
    assert made.samples == 0


@pytest.mark.parametrize(
    ("dataset", "batch_size", "rank", "sentence"),
    [
        ([], 1, 0, "The data set is empty"),
        (iter([1]), 1, 0, "of type list_iterator has no length"),
        ([1], 0, 0, "batch_size is 0"),
        ([1], 1, 2, "rank is 2, but must be from 0 to 1"),
    ],
)
def test_bad_arguments(
    dataset: SizedDataset[int], batch_size: int, rank: int, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        zeroir.ResumableLoader(dataset, batch_size=batch_size, rank=rank, world_size=2)


# ---- The order of samples: a permutation of each epoch, a pure function of seed and position


SIZES = st.integers(1, 300)
SEEDS = st.integers(-(2**63), 2**63 - 1)
ORDER = [8, 9, 3, 2, 5, 1, 4, 0, 6, 7, 4, 1, 2, 9, 6, 7, 0, 5, 8, 3]
SAMPLE_SEED = 6033420595435180662
BATCH_SEED = 2981108972999707378


@given(SIZES, SEEDS, st.integers(0, 50))
def test_every_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size=size, seed=seed)
    assert sorted(order.indices(epoch * size, (epoch + 1) * size)) == list(range(size))


@pytest.mark.slow
@given(SIZES, SEEDS, st.lists(st.integers(0, 1000), min_size=3, max_size=3))
def test_a_part_is_that_of_the_whole(size: int, seed: int, places: list[int]) -> None:
    first, middle, last = sorted(places)
    order = SampleOrder(size=size, seed=seed)
    assert order.indices(first, last) == order.indices(first, middle) + order.indices(middle, last)


def test_epochs_and_seeds_differ() -> None:
    epochs = [
        tuple(SampleOrder(size=40, seed=seed).indices(40 * epoch, 40 * (epoch + 1)))
        for seed in (0, 1, -1)
        for epoch in range(3)
    ]
    assert len(set(epochs)) == 9


@pytest.mark.slow
def test_all_permutations_are_about_equally_frequent() -> None:
    order = SampleOrder(size=4, seed=3)
    counts = Counter(tuple(order.indices(4 * epoch, 4 * epoch + 4)) for epoch in range(6000))
    assert len(counts) == 24
    # 250 are expected of each, with a standard deviation below 16.
    assert min(counts.values()) > 170
    assert max(counts.values()) < 330


def test_without_shuffling_samples_come_as_they_stand() -> None:
    order = SampleOrder(size=3, seed=3, is_shuffled=False)
    assert order.indices(1, 8) == [1, 2, 0, 1, 2, 0, 1]


def test_a_late_position_of_a_large_data_set_takes_no_memory_for_the_rest() -> None:
    order = SampleOrder(size=10**15, seed=0)
    indices = order.indices(10**15 - 5, 10**15 + 5)
    assert len(set(indices)) == 10
    assert all(0 <= index < 10**15 for index in indices)
    assert max(indices) > 10**13


def test_the_order_is_for_ever() -> None:
    """Checkpoints keep positions in it, so another version must not change it."""
    assert SampleOrder(size=10, seed=0).indices(0, 20) == ORDER
    assert SampleOrder(size=10, seed=0).sample_seed(3, 7) == SAMPLE_SEED
    assert SampleOrder(size=10, seed=0).batch_seed(3) == BATCH_SEED
