"""Places for buffers in one block of memory: each gets the lowest bytes that are free during its lives (first fit).

The result depends on the order in which buffers are placed, and no order is best for every program. So several are
tried, and each is then tried again with the buffers that ended too high moved to its front, until a placement needs no
more than can be live at once or enough were tried. The search is deterministic, so every run finds the same places.

Buffers conflict if two of their lives may overlap in time, and pairs of these are listed. Where there would be too
many, as in a deep network whose every layer saves values for the backward, the lives that overlap most others are
stacked first: the longest at the bottom, those within its time on top of it. All others are placed above the stack and
have far fewer pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zeroir.memory.lifetimes import Lifetimes

Ints = NDArray[np.int64]

MOST_PAIRS: Final = 2_000_000
"""With more pairs of lives that may overlap, long lives are stacked."""

MOST_PLACEMENTS: Final = 30_000
"""The search tries no further order once it has placed this many buffers, over all orders together."""

_FEW_MEETINGS: Final = 64
"""A buffer that overlaps no more later lives than this is not stacked."""

_HEIGHTS: Final = 4096
"""The stack's height is recorded for this many intervals of time of equal length."""

_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersToPlace:
    """Buffers by number, in the order of their first lives.

    ``spans`` are the total lengths of each one's lives, ``ends`` when every stream knows that the last of them ended.
    ``stacked`` are the offsets of those that were stacked, -1 for all others; these must be placed at ``lowest`` or
    higher, and ``conflicts`` are, in order, those among them that a buffer must not overlap.
    """

    names: Sequence[str]
    sizes: Ints
    spans: Ints
    ends: Ints
    stacked: Ints
    lowest: Ints
    conflicts: Sequence[Ints]

    @classmethod
    def of(
        cls,
        lifetimes: Lifetimes,
        lives: Sequence[int],
        sizes: Sequence[int],
        most_pairs: int = MOST_PAIRS,
    ) -> BuffersToPlace:
        """Prepare the buffers of these lives; ``sizes`` are the bytes of every life of the program."""
        chosen = np.array(lives)
        numbers: dict[str, int] = {}
        buffer_of = np.array(
            [numbers.setdefault(lifetimes.buffers[life], len(numbers)) for life in lives]
        )
        count = len(numbers)
        bytes_of = np.zeros(count, dtype=np.int64)
        bytes_of[buffer_of] = np.array(sizes)[chosen]
        meetings = _Meetings.of(lifetimes, chosen)
        spans, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        np.add.at(spans, buffer_of, np.array(lifetimes.lasts)[chosen] - meetings.firsts)
        np.maximum.at(ends, buffer_of, meetings.untils)
        stacked, lowest = np.full(count, _NOWHERE), np.zeros(count, dtype=np.int64)
        if meetings.counts.sum() > most_pairs:
            stacked, lowest = _stack(
                meetings, buffer_of, bytes_of, spans, lifetimes.stop, most_pairs
            )
        return cls(
            names=list(numbers),
            sizes=bytes_of,
            spans=spans,
            ends=ends,
            stacked=stacked,
            lowest=lowest,
            conflicts=meetings.conflicts(buffer_of, stacked != _NOWHERE),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meetings:
    """The later lives that each life may overlap: those that a stream begins before it knows that the life ended.

    ``begun`` has the lives that each stream begins, in order, and ``ranges`` which of them, from and to, each life may
    overlap; ``counts`` is their total number. Lives begin at ``firsts``; at ``untils`` every stream knows their end.
    """

    firsts: Ints
    untils: Ints
    begun: Sequence[Ints]
    ranges: Sequence[tuple[Ints, Ints]]
    counts: Ints

    @classmethod
    def of(cls, lifetimes: Lifetimes, chosen: Ints) -> _Meetings:
        firsts, streams = np.array(lifetimes.firsts)[chosen], np.array(lifetimes.streams)[chosen]
        used = np.unique(streams).tolist()
        free = [np.array(lifetimes.free_from[stream])[chosen] for stream in used]
        begun = [np.flatnonzero(streams == stream) for stream in used]
        ranges: list[tuple[Ints, Ints]] = []
        for lives, ends in zip(begun, free, strict=True):
            start = lives.searchsorted(np.arange(len(chosen)), side="right")
            stop = firsts[lives].searchsorted(ends, side="left")
            ranges.append((start, np.maximum(start, stop)))
        return cls(
            firsts=firsts,
            untils=np.maximum.reduce(free),
            begun=begun,
            ranges=ranges,
            counts=np.sum([stop - start for start, stop in ranges], axis=0),
        )

    def conflicts(self, buffer_of: Ints, is_stacked: NDArray[np.bool_]) -> list[Ints]:
        """Return for each buffer those that it must not overlap, none of them stacked."""
        count = len(is_stacked)
        # There may be millions of keys: each step frees or reuses the arrays of the previous one.
        keys = np.concatenate(list(self._pair_keys(buffer_of, is_stacked)))
        keys.sort()
        keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]]
        stops = keys.searchsorted(np.arange(1, count + 1) * count).tolist()
        keys %= count
        return [keys[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def _pair_keys(self, buffer_of: Ints, is_stacked: NDArray[np.bool_]) -> Iterator[Ints]:
        """Yield each pair of buffers with overlapping lives as one number, first × count + second, both ways."""
        count = len(is_stacked)
        for begun, (start, stop) in zip(self.begun, self.ranges, strict=True):
            lengths = np.where(is_stacked[buffer_of], 0, stop - start)
            # For every life the numbers from its start to its stop, life by life.
            skipped = np.repeat(start - np.cumsum(lengths) + lengths, lengths)
            earlier = np.repeat(buffer_of, lengths)
            later = buffer_of[begun[np.arange(len(skipped)) + skipped]]
            is_pair = ~is_stacked[later] & (earlier != later)
            earlier, later = earlier[is_pair], later[is_pair]
            yield earlier * count + later
            yield later * count + earlier


def _stack(
    meetings: _Meetings, buffer_of: Ints, sizes: Ints, spans: Ints, stop: int, most_pairs: int
) -> tuple[Ints, Ints]:
    """Stack the buffers that overlap most others; return their offsets, and the lowest place for all others.

    A buffer is stacked if the stack is level throughout its lives. Where it is not, the buffer is skipped, unless
    the skipped buffers then overlap more than ``most_pairs`` lives.
    """
    count = len(sizes)
    few_meetings = max(most_pairs // count, min(most_pairs, _FEW_MEETINGS))
    offsets, lowest = np.full(count, _NOWHERE), np.zeros(count, dtype=np.int64)
    meets = np.zeros(count, dtype=np.int64)
    np.add.at(meets, buffer_of, meetings.counts)
    windows: list[list[slice]] = [[] for _ in range(count)]
    begins = (meetings.firsts * _HEIGHTS // stop).tolist()
    stops = (meetings.untils * _HEIGHTS // stop + 1).tolist()
    for buffer, begin, end in zip(buffer_of.tolist(), begins, stops, strict=True):
        windows[buffer].append(slice(begin, end))
    heights = np.zeros(_HEIGHTS + 1, dtype=np.int64)
    left = 0
    for buffer in np.argsort(-spans, kind="stable").tolist():
        if meets[buffer] <= few_meetings:
            continue
        parts = [heights[window] for window in windows[buffer]]
        base = max(int(part.max()) for part in parts)
        is_level = all(int(part.min()) == base for part in parts)
        if not is_level and left + meets[buffer] <= most_pairs:
            left += int(meets[buffer])
            continue
        offsets[buffer] = base
        for part in parts:
            part[:] = base + sizes[buffer]
    for buffer in np.flatnonzero(offsets == _NOWHERE).tolist():
        lowest[buffer] = max(int(heights[window].max()) for window in windows[buffer])
    return offsets, lowest


def find_offsets(
    buffers: BuffersToPlace, live_bytes: int, most_placements: int = MOST_PLACEMENTS
) -> Ints:
    """Return offsets of all buffers; the search ends once they need ``live_bytes``, or after ``most_placements``.

    At least one order is tried.
    """
    starts, again = _orders(buffers), deque[list[int]]()
    best, best_bytes, tried = buffers.stacked, -1, 0
    while (order := next(starts, None) or (again.popleft() if again else None)) is not None:
        offsets = _first_fit(buffers, order)
        ends = offsets + buffers.sizes
        size_bytes = int(ends.max())
        if best_bytes < 0 or size_bytes < best_bytes:
            best, best_bytes = offsets, size_bytes
        tried += 1
        if best_bytes <= live_bytes or tried * len(order) >= most_placements:
            break
        # Every other time only those that end last are moved, because otherwise orders would soon repeat.
        is_high = (ends > (live_bytes if tried % 2 else size_bytes - 1)).tolist()
        changed = sorted(order, key=lambda buffer: not is_high[buffer])
        if changed != order:
            again.append(changed)
    return best


def _orders(buffers: BuffersToPlace) -> Iterator[list[int]]:
    """Yield the initial orders; some group buffers by the binary order of magnitude of their size or span."""
    sizes, spans, ends = buffers.sizes.tolist(), buffers.spans.tolist(), buffers.ends.tolist()
    keys: Sequence[Callable[[int], tuple[int, ...]]] = (
        lambda at: (-sizes[at].bit_length(), -spans[at]),
        lambda at: (-sizes[at], -spans[at]),
        lambda at: (-sizes[at].bit_length(),),
        lambda at: (-ends[at],),
        lambda at: (-spans[at].bit_length(),),
        lambda at: (-sizes[at] * spans[at], -sizes[at]),
        lambda at: (at,),
        # Full parameters and gradients in turn, where they are few and far larger than the values between them.
        lambda at: (-(sizes[at].bit_length() // 3), -ends[at]),
    )
    left = np.flatnonzero(buffers.stacked == _NOWHERE).tolist()
    for key in keys:
        yield sorted(left, key=key)


def _first_fit(buffers: BuffersToPlace, order: Sequence[int]) -> Ints:
    """Place these buffers, one after the other, above those that were stacked."""
    offsets, ends = buffers.stacked.copy(), buffers.stacked + buffers.sizes
    sizes, lowest = buffers.sizes.tolist(), buffers.lowest.tolist()
    for buffer in order:
        near = buffers.conflicts[buffer]
        near = near[offsets[near] != _NOWHERE]
        near = near[offsets[near].argsort(kind="stable")]
        # Where the buffer may start: at the lowest, or where one and all that start below it have ended.
        tops = np.empty(len(near) + 1, dtype=np.int64)
        tops[0], tops[1:] = lowest[buffer], ends[near]
        np.maximum.accumulate(tops, out=tops)
        fits = offsets[near] - tops[:-1] >= sizes[buffer]
        first = int(fits.argmax()) if len(near) else 0
        place = tops[first] if len(near) and fits[first] else tops[-1]
        offsets[buffer], ends[buffer] = place, place + sizes[buffer]
    return offsets
