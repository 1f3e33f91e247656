"""Places for buffers in one block: the smallest gap that fits (best fit), one buffer after the other.

Many buffers are laid in two steps. Lives that nest, such as those of values that a forward pass saves for the backward,
are laid first, the longest at the bottom, where they make a floor without gaps whose height changes over time. What
stands above it is short-lived and is placed in the order of beginnings, so that only what is live needs be looked at.
What then stands too high is moved (see ``Layout.lower``).
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Sequence
from typing import Final

import numpy as np

from zeroir.memory.field import Bools, Field, Floats, Ints, Neighbours
from zeroir.memory.skyline import Skyline, highest

_NOWHERE: Final = -1
_NO_LIMIT: Final = 1 << 62
_NOISE: Final = 0.3


class Layout:
    """A placement in the making; ``offsets`` are those of every buffer.

    What makes a floor lives for so many moments or longer; by default, for as long as some 32 others take to begin.
    """

    def __init__(self, field: Field, *, has_floor: bool, shortest: int | None = None) -> None:
        self._field = field
        count = len(field.names)
        self.offsets = np.full(count, _NOWHERE, dtype=np.int64)
        # How high each buffer must stand at least.
        self._floors = np.zeros(count, dtype=np.int64)
        if has_floor:
            self._lay_floor(shortest)
        self._near = Neighbours.of(field, self.offsets != _NOWHERE)

    @property
    def size_bytes(self) -> int:
        """The end of the last byte that a buffer takes."""
        return int((self.offsets + self._field.sizes).max())

    def place(self, order: Sequence[int]) -> None:
        """Place these buffers, one after the other; all others of the field leave again. The floor stays as it is."""
        is_apart = self._near.is_apart
        self.offsets[~is_apart] = _NOWHERE
        self._place([buffer for buffer in order if not is_apart[buffer]])

    def sweep(self) -> None:
        """Place all buffers in the order of their beginnings, those with several lives before the others."""
        field = self._field
        lives = np.bincount(field.buffer_of)
        recurring = np.flatnonzero((lives > 1) & ~self._near.is_apart)
        self._place(recurring[np.argsort(-field.sizes[recurring], kind="stable")].tolist())
        ahead = self._ahead(self.offsets != _NOWHERE)
        offsets, sizes, floors = self.offsets.tolist(), field.sizes.tolist(), self._floors.tolist()
        is_apart = self._near.is_apart.tolist()
        buffer_of, streams = field.buffer_of.tolist(), field.streams.tolist()
        free_from = [free.tolist() for free in field.free]
        # For each stream what may be live for all that it knows, by offset: start, end, and when the stream knows it
        # ended; and how many of the lives it has looked at.
        live: list[list[tuple[int, int, int]]] = [[] for _ in free_from]
        seen = [0] * len(live)
        for life, (buffer, now) in enumerate(zip(buffer_of, field.firsts.tolist(), strict=True)):
            if offsets[buffer] != _NOWHERE:
                continue
            stream = streams[life]
            free, here = free_from[stream], live[stream]
            for other in range(seen[stream], life):
                of = buffer_of[other]
                if free[other] > now and not is_apart[of]:
                    insort(here, (offsets[of], offsets[of] + sizes[of], free[other]))
            seen[stream] = life
            taken, gone = here, 0
            for buffers, begin, end in ahead:
                if begin[life] < end[life]:
                    more = [
                        (offsets[of], offsets[of] + sizes[of], _NO_LIMIT)
                        for of in buffers[begin[life] : end[life]]
                    ]
                    taken = sorted(taken + more)
            size, stop = sizes[buffer], floors[buffer]
            smallest, found = _NO_LIMIT, _NOWHERE
            for start, end_of, until in taken:
                if until <= now:
                    gone += 1
                    continue
                if start > stop:
                    gap = start - stop
                    if size <= gap < smallest:
                        smallest, found = gap, stop
                if end_of > stop:
                    stop = end_of
            if 2 * gone > len(here):
                live[stream] = [one for one in here if one[2] > now]
            offsets[buffer] = stop if found == _NOWHERE else found
        self.offsets[:] = offsets

    def lower(self, limit: int, steps: int, chance: random.Random, *, roots: int | None) -> int:
        """Move buffers until all end below the limit, if so many steps do; how many it took, or -1: all as before.

        A buffer that fits nowhere takes the place where it costs least, and whoever stands there is placed anew. What a
        buffer is worth are its bytes, of which so many square roots are taken, or 1 with None; and the more the more
        often it fitted nowhere. A little chance keeps a few from taking each other's place for ever. Unlike powers,
        roots have the same bits on every machine, and so has the layout.
        """
        sizes, before = self._field.sizes, self.offsets.copy()
        high = before + sizes > limit
        if (np.where(self._near.is_apart, before, self._floors) + sizes > limit).any():
            return -1
        waiting: list[int] = np.flatnonzero(high).tolist()
        self.offsets[high] = _NOWHERE
        worth: Floats = np.ones(len(sizes)) if roots is None else sizes.astype(np.float64)
        for _ in range(roots or 0):
            worth = np.sqrt(worth)
        prices = worth.copy()
        for step in range(steps):
            if not waiting:
                return step
            buffer = waiting.pop(chance.randrange(len(waiting)))
            near, starts, ends = self._taken(buffer)
            at = self._best_gap(buffer, starts, ends, limit)
            if at == _NOWHERE:
                prices[buffer] += worth[buffer]
                at = self._cheapest(buffer, starts, ends, prices[near], limit, chance)
                evicted = near[(starts < at + sizes[buffer]) & (ends > at)]
                self.offsets[evicted] = _NOWHERE
                waiting += evicted.tolist()
            self.offsets[buffer] = at
        if not waiting:
            return steps
        self.offsets[:] = before
        return -1

    # ------------------------------------------------------------------------------------------------------ one buffer

    def _place(self, order: Sequence[int]) -> None:
        for buffer in order:
            _, starts, ends = self._taken(buffer)
            self.offsets[buffer] = self._best_gap(buffer, starts, ends, _NO_LIMIT)

    def _taken(self, buffer: int) -> tuple[Ints, Ints, Ints]:
        """Those placed that the buffer may meet, by offset, where they start and where they end."""
        near = self._near(buffer)
        starts = self.offsets[near]
        order = np.argsort(starts, kind="stable")
        order = order[int(starts[order].searchsorted(_NOWHERE, side="right")) :]
        near, starts = near[order], starts[order]
        return near, starts, starts + self._field.sizes[near]

    def _best_gap(self, buffer: int, starts: Ints, ends: Ints, limit: int) -> int:
        """The start of the smallest gap that the buffer fits, else the end of all, but for the limit."""
        size = int(self._field.sizes[buffer])
        stops = np.maximum.accumulate(np.concatenate((self._floors[buffer : buffer + 1], ends)))
        gaps = starts - stops[:-1]
        gaps[gaps < size] = _NO_LIMIT
        if len(gaps):
            at = int(gaps.argmin())
            if gaps[at] < _NO_LIMIT:
                return int(stops[at])
        return int(stops[-1]) if stops[-1] + size <= limit else _NOWHERE

    def _cheapest(
        self,
        buffer: int,
        starts: Ints,
        ends: Ints,
        prices: Floats,
        limit: int,
        chance: random.Random,
    ) -> int:
        """Where, below the limit, the buffer drives out what costs least: beside another, at the floor or the limit."""
        size, floor = int(self._field.sizes[buffer]), int(self._floors[buffer])
        places = np.unique(np.concatenate(([floor, limit - size], ends, starts - size)))
        places = places[(places >= floor) & (places + size <= limit)]
        by_end = np.argsort(ends, kind="stable")
        begun = np.concatenate(([0.0], np.cumsum(prices)))[starts.searchsorted(places + size)]
        over = np.concatenate(([0.0], np.cumsum(prices[by_end])))
        over = over[ends[by_end].searchsorted(places, side="right")]
        noise = np.array([1 + _NOISE * chance.random() for _ in range(len(places))])
        return int(places[int(((begun - over) * noise).argmin())])

    # -------------------------------------------------------------------------------------------------------- the floor

    def _lay_floor(self, shortest: int | None) -> None:
        """Place long lives that stand level on those below them, and say how high all others stand at least."""
        field = self._field
        skyline = Skyline(field.stop)
        if shortest is None:
            shortest = max(32 * field.stop // len(field.buffer_of), 64)
        long = np.flatnonzero(field.spans >= shortest)
        for buffer in long[np.argsort(-field.spans[long], kind="stable")].tolist():
            windows = [(int(field.firsts[i]), int(field.untils[i])) for i in field.lives[buffer]]
            base = skyline.raise_level(windows, int(field.sizes[buffer]))
            if base is not None:
                self.offsets[buffer] = base
        heights = highest(skyline.heights(), field.firsts, field.untils)
        np.maximum.at(self._floors, field.buffer_of, heights)

    def _ahead(
        self, is_placed: Bools
    ) -> Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        """Of each stream the buffers of the lives that it begins and that are placed, and for each life which of them.

        They are those between two bounds, which begin after the life and may meet it.
        """
        field, found = self._field, []
        placed = (is_placed & ~self._near.is_apart)[field.buffer_of]
        for stream, free in enumerate(field.free):
            lives = np.flatnonzero(placed & (field.streams == stream))
            if len(lives):
                begin = lives.searchsorted(np.arange(len(free)), side="right")
                end = field.firsts[lives].searchsorted(free, side="left")
                found.append((field.buffer_of[lives].tolist(), begin.tolist(), end.tolist()))
        return found
