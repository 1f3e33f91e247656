"""A map from the elements of a buffer to values, stored as sorted, disjoint, adjacent pieces."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class IntervalMap(Generic[T]):
    """Covers ``[0, numel)``. A piece is ``(start, stop, value)``; neighbours with equal values are merged on write."""

    __slots__ = ("numel", "starts", "values")

    def __init__(self, numel: int, value: T) -> None:
        self.numel = numel
        self.starts = [0]
        self.values = [value]

    def read(self, start: int, stop: int) -> list[tuple[int, int, T]]:
        """Return the pieces of ``[start, stop)``, clipped to it."""
        starts, values = self.starts, self.values
        i = bisect_right(starts, start) - 1
        pieces: list[tuple[int, int, T]] = []
        last = len(starts) - 1
        at = start
        while at < stop:
            end = starts[i + 1] if i < last else self.numel
            if end >= stop:
                end = stop  # also where both are equal at the bound only
            pieces.append((at, end, values[i]))
            at = end
            i += 1
        return pieces

    def write(self, start: int, stop: int, value: T) -> None:
        """Set ``[start, stop)`` to one value."""
        if start >= stop:
            return
        starts, values = self.starts, self.values
        if start == 0 and stop == self.numel:
            self.starts, self.values = [0], [value]
            return
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, stop - 1) - 1
        end = starts[last + 1] if last + 1 < len(starts) else self.numel
        tail = values[last]
        new_starts, new_values = [start], [value]
        if starts[first] < start:
            if values[first] == value:
                new_starts[0] = starts[first]
            else:
                new_starts.insert(0, starts[first])
                new_values.insert(0, values[first])
        elif first > 0 and values[first - 1] == value:
            first -= 1
            new_starts[0] = starts[first]
        if stop < end:
            if tail != value:
                new_starts.append(stop)
                new_values.append(tail)
        elif last + 1 < len(starts) and values[last + 1] == value:
            last += 1
        starts[first : last + 1] = new_starts
        values[first : last + 1] = new_values
