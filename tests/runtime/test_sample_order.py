"""The order of samples: a permutation of each epoch, a pure function of seed and position."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.runtime.data.sample_order import SampleOrder

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
