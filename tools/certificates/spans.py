"""What the checks share: values of ranges of elements, and the refusal of a certificate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

Pieces = list[tuple[int, int, Any]]


class RefusedError(Exception):
    """A claim does not follow, or a law does not follow from the claims; the message is one sentence."""


def require(holds: object, sentence: str) -> None:
    """Refuse the certificate, unless something holds."""
    if not holds:
        raise RefusedError(sentence)


class Spans:
    """A value for each of ``numel`` elements."""

    def __init__(self, numel: int, value: object) -> None:
        self.starts: list[int] = [0, numel]
        self.values: list[Any] = [value, None]

    def read(self, start: int, stop: int) -> Pieces:
        """Return the pieces of a range."""
        require(0 <= start <= stop <= self.starts[-1], "an op uses elements that do not exist")
        pieces: Pieces = []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(self.starts[index + 1], stop)
            pieces.append((start, end, self.values[index]))
            start, index = end, index + 1
        return pieces

    def write(self, start: int, stop: int, value: object) -> None:
        """Give a range one value."""
        require(0 <= start <= stop <= self.starts[-1], "an op uses elements that do not exist")
        if start < stop:
            first, last = bisect_right(self.starts, start) - 1, bisect_right(self.starts, stop - 1)
            head = [self.starts[first]] if self.starts[first] < start else []
            tail = [stop] if self.starts[last] > stop else []
            values = [self.values[first]] * len(head), [self.values[last - 1]] * len(tail)
            self.starts[first:last] = [*head, start, *tail]
            self.values[first:last] = [*values[0], value, *values[1]]


def aligned(*lists: Pieces) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield the pieces of lists over the same elements, cut where any of them is."""
    places, at = [0] * len(lists), 0
    require(len({pieces[-1][1] if pieces else 0 for pieces in lists}) == 1, "sizes differ")
    while lists[0] and at < lists[0][-1][1]:
        here = [pieces[i] for pieces, i in zip(lists, places, strict=True)]
        stop = min(piece[1] for piece in here)
        yield at, stop, [piece[2] for piece in here]
        places = [i + (piece[1] == stop) for i, piece in zip(places, here, strict=True)]
        at = stop


def merged(pieces: Sequence[tuple[int, int, Any]]) -> Pieces:
    """Return pieces of which no two neighbours have one value."""
    found: Pieces = []
    for start, stop, value in pieces:
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], stop, value)
        elif start < stop:
            found.append((start, stop, value))
    return found
