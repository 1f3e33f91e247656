"""The order in which a run takes samples: a pure function of a seed, for any number of ranks.

The samples of all epochs form one endless stream. Its positions ``[e · size, (e + 1) · size)`` are epoch e, a
permutation of the data set that depends on the seed and e alone. Any part of the stream is computed directly, without
memory for the rest, so a run that resumes late in an epoch starts as fast as a new one.

A permutation is a Feistel network over two digits with base ⌈√size⌉, whose results outside the data set are encrypted
again until they are inside ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zeroir.runtime.execution.seeds import drawn

_ROUNDS: Final = 8
_ORDER: Final = 1
_SAMPLE: Final = 2
_BATCH: Final = 3
"""The uses of a seed; numbers drawn for different uses are independent."""

_Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The stream of samples of a data set with ``size`` samples, shuffled or in the order of the data set.

    Seeds are for random generators that are seeded anew for each sample or batch: 0 ≤ seed < 2^63.
    """

    size: int
    seed: int
    is_shuffled: bool = True

    def indices(self, start: int, stop: int) -> list[int]:
        """Return the indices in the data set of the samples at positions [start, stop) of the stream."""
        indices: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self.size)
            end = min(self.size, first + stop - start)
            indices += self._indices_in_epoch(epoch, first, end)
            start += end - first
        return indices

    def sample_seed(self, position: int, index: int) -> int:
        """Return the seed of the sample at a position, which has this index in the data set."""
        return drawn(self.seed, _SAMPLE, position // self.size, index) >> 1

    def batch_seed(self, position: int) -> int:
        """Return the seed for processing a whole batch whose first sample is at this position."""
        return drawn(self.seed, _BATCH, position) >> 1

    def _indices_in_epoch(self, epoch: int, first: int, end: int) -> list[int]:
        if not self.is_shuffled:
            return list(range(first, end))
        keys = [drawn(self.seed, _ORDER, epoch, number) for number in range(_ROUNDS)]
        places = _encrypted(np.arange(first, end, dtype=np.uint64), self.size, keys)
        while (outside := places >= self.size).any():
            places[outside] = _encrypted(places[outside], self.size, keys)
        return [int(place) for place in places]


def _encrypted(values: _Words, size: int, keys: list[int]) -> _Words:
    """Return a permutation of [0, base²), where base = ⌈√size⌉."""
    base = np.uint64(math.isqrt(size - 1) + 1)
    high, low = values // base, values % base
    for key in keys:
        high, low = low, (high + _mixed(low + np.full_like(low, key)) % base) % base
    return high * base + low


def _mixed(values: _Words) -> _Words:
    """Return one step of SplitMix64 for each value (Steele, Lea and Flood, Fast Splittable PRNGs, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
