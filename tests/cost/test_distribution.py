"""The largest and the mean of independent draws, compared with all combinations of draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from statistics import fmean

import pytest

from zeroir.cost.distribution import Distribution

WEIGHTS = [(3.0, 1), (1.0, 5), (2.5, 4), (1.0, 2)]


def expected(of: Callable[[Sequence[float]], float], count: int) -> float:
    """Add up over all combinations of draws."""
    total = sum(weight for _, weight in WEIGHTS)
    return sum(
        of([value for value, _ in draws]) * prod(weight / total for _, weight in draws)
        for draws in product(WEIGHTS, repeat=count)
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_expectations_are_those_of_all_combinations(count: int) -> None:
    one = Distribution.of(WEIGHTS)
    assert one.values == (1.0, 2.5, 3.0)
    assert sum(one.probabilities) == pytest.approx(1)
    assert one.largest_of(count).mean == pytest.approx(expected(max, count))
    assert one.mean_of(count).mean == pytest.approx(one.mean)
    # The largest of two means of two draws: not only the mean of the distribution counts.
    assert one.mean_of(2).largest_of(2).mean == pytest.approx(
        expected(lambda draws: max(fmean(draws[:2]), fmean(draws[2:])), 4), rel=1e-3
    )


@pytest.mark.slow
def test_one_value_stays_alone_and_many_draws_are_their_mean() -> None:
    alone = Distribution.of([(2.0, 7)])
    assert alone.largest_of(512) == alone.mean_of(8) == alone
    one = Distribution.of(WEIGHTS)
    assert one.largest_of(10**6).mean == pytest.approx(3.0)
    assert one.mean_of(10**5).largest_of(8).mean == pytest.approx(one.mean, rel=0.01)
