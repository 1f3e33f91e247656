"""Distributions of a quantity over a finite number of values, for the largest and for the mean of independent draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

_MOST_CELLS: Final = 2**20
_CELLS: Final = 1024
_FEWEST_CELLS: Final = 16


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values in ascending order, and the probability of each; the probabilities add up to 1."""

    values: tuple[float, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[float, float]]) -> Self:
        """Return the distribution of values with these weights, of which some are above 0."""
        by_value: dict[float, float] = {}
        for value, weight in weights:
            by_value[value] = by_value.get(value, 0.0) + weight
        total = math.fsum(by_value.values())
        present = sorted((value, weight) for value, weight in by_value.items() if weight > 0)
        return cls(
            tuple(value for value, _ in present), tuple(weight / total for _, weight in present)
        )

    @property
    def mean(self) -> float:
        """The expected value."""
        return math.fsum(
            value * chance for value, chance in zip(self.values, self.probabilities, strict=True)
        )

    def largest_of(self, count: int) -> Distribution:
        """Return the distribution of the largest of so many independent draws."""
        below = 0.0
        weights: list[tuple[float, float]] = []
        for value, chance in zip(self.values, self.probabilities, strict=True):
            up_to = min(1.0, below + chance)
            weights.append((value, up_to**count - below**count))
            below = up_to
        return Distribution.of(weights)

    def mean_of(self, count: int) -> Distribution:
        """Return the distribution of the mean of so many independent draws.

        It is computed on a grid with steps of a thousandth of the range, or longer ones for more than a thousand draws.
        The mean is exact.
        """
        import numpy as np

        lowest, highest = self.values[0], self.values[-1]
        if count == 1 or lowest == highest:
            return self
        cells = max(_FEWEST_CELLS, min(_CELLS, _MOST_CELLS // count))
        step = (highest - lowest) / cells
        of_one = np.zeros(cells + 2)
        for value, chance in zip(self.values, self.probabilities, strict=True):
            place = (value - lowest) / step
            cell = int(place)
            # Shared between two neighbours, so that the mean stays.
            of_one[cell] += chance * (1 - (place - cell))
            of_one[cell + 1] += chance * (place - cell)
        length = cells * count + 2
        of_sum = np.fft.irfft(np.fft.rfft(of_one, 2 * length) ** count, 2 * length)[:length]
        of_sum[of_sum < 1e-15] = 0  # the rounding of the transform
        return Distribution.of(
            (lowest + step * cell / count, float(of_sum[cell])) for cell in of_sum.nonzero()[0]
        )
