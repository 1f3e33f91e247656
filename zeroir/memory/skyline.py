"""How high memory is taken at each moment: a step function that long lives raise."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Skyline:
    """A height for each of so many moments, 0 at first. Windows are half-open ranges of moments, none empty."""

    def __init__(self, stop: int) -> None:
        self._stop = stop
        # Steps: where each starts, and its height. Two neighbours differ in height.
        self._starts = [0]
        self._heights = [0]

    def raise_level(self, windows: Sequence[tuple[int, int]], size: int) -> int | None:
        """Put ``size`` on top if the height is one in all these windows: that height, else None and nothing changes.

        The windows are in the order of their beginnings.
        """
        apart: list[tuple[int, int]] = []
        for first, stop in windows:
            if apart and first <= apart[-1][1]:
                apart[-1] = apart[-1][0], max(stop, apart[-1][1])
            else:
                apart.append((first, stop))
        base = self._heights[self._step(apart[0][0])]
        for first, stop in apart:
            at = self._step(first)
            if self._heights[at] != base or self._end(at) < stop:
                return None
        for first, stop in apart:
            self._raise(first, stop, base + size)
        return base

    def heights(self) -> NDArray[np.int64]:
        """The height at every moment."""
        return np.repeat(np.array(self._heights), np.diff([*self._starts, self._stop]))

    def _step(self, moment: int) -> int:
        return bisect_right(self._starts, moment) - 1

    def _end(self, at: int) -> int:
        return self._starts[at + 1] if at + 1 < len(self._starts) else self._stop

    def _raise(self, first: int, stop: int, height: int) -> None:
        """Give the window, which lies in one step, another height."""
        begin = self._step(first)
        end, base = begin + 1, self._heights[begin]
        steps = [(first, height)]
        if self._starts[begin] < first:
            steps.insert(0, (self._starts[begin], base))
        elif begin > 0 and self._heights[begin - 1] == height:
            begin -= 1
            steps = [(self._starts[begin], height)]
        if stop < self._end(end - 1):
            steps.append((stop, base))
        elif end < len(self._starts) and self._heights[end] == height:
            end += 1
        self._starts[begin:end] = [start for start, _ in steps]
        self._heights[begin:end] = [top for _, top in steps]


def highest(
    heights: NDArray[np.int64], firsts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The most of the heights in each window, ``heights[firsts[i]:stops[i]]``; none is empty.

    Two windows of a power of two moments, one from each end, cover one of any length.
    """
    found = np.zeros(len(firsts), dtype=np.int64)
    exponents = np.frexp(stops - firsts)[1] - 1
    for exponent in range(int(exponents.max(initial=-1)) + 1):
        width = 1 << exponent
        here = np.flatnonzero(exponents == exponent)
        found[here] = np.maximum(heights[firsts[here]], heights[stops[here] - width])
        # From here on the height at a moment is the most in twice the width.
        heights = np.maximum(heights[:-width], heights[width:])
    return found
