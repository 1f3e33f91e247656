"""Where temporary buffers stand in one block of memory per space: a place each, for the whole run of a program.

Two buffers may share memory where, in every section that both live in, the end of one happens before the beginning of
the other, by streams and waits and not merely in the program's text: then no stream can run so far ahead or so late
that they meet. A place is the smallest gap that fits (best fit), and what is placed first matters: several orders are
tried, and the one that takes least memory is kept.

Lives that nest, such as those of values that a forward pass saves for the backward, are laid first, the longest at the
bottom, where they make a floor without gaps whose height changes over time. What stands above it is short-lived, so
that each buffer meets few others, and a program with 100,000 of them is placed in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from zeroir.ir.buffers import Space
from zeroir.ir.lifetimes import Lifetimes
from zeroir.ir.most_live import most_live
from zeroir.ir.program import Program

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT_BYTES: Final = 512
"""Every buffer starts on a multiple of this, as CUDA's allocator would have it."""

CLOSE: Final = 1.001
"""A placement that takes so little more than can be live at once ends the search."""

_FEW: Final = 2_000
"""Beyond so many buffers what nests is always laid first, and a placement within 1 % of the bound ends the search."""

_RETRIES: Final = 12
_CHANGES_FROM: Final = 8 + _RETRIES
_MOST_ATTEMPTS: Final = 400
_WORK: Final = 40_000
"""So many buffers are placed at most, over all attempts, where there is more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Byte offsets of the temporary buffers of one space in a block of ``size_bytes``.

    ``live_bytes`` are live at once in some order of ops that the program allows, buffers rounded up to the alignment:
    no placement takes less.
    """

    offsets: Mapping[str, int]
    size_bytes: int
    live_bytes: int = 0

    @property
    def gap(self) -> float:
        """How much more the block takes than can be live at once, as a fraction of that."""
        return self.size_bytes / self.live_bytes - 1 if self.live_bytes else 0.0


def placements(program: Program) -> Mapping[Space, Placement]:
    """The places that the program's own plan gives, or else those that ``place_all`` finds."""
    return planned(program) or place_all(program)


def planned(program: Program) -> Mapping[Space, Placement] | None:
    """The places that the program itself gives its temporary buffers, with ``live_bytes`` 0; None without a plan."""
    found: dict[Space, dict[str, int]] = {}
    sizes: dict[Space, int] = {}
    for buffer in program.buffers:
        if buffer.is_persistent:
            continue
        if buffer.offset is None:
            return None
        found.setdefault(buffer.space, {})[buffer.name] = buffer.offset
        stop = buffer.offset + rounded(buffer.size_bytes)
        sizes[buffer.space] = max(sizes.get(buffer.space, 0), stop)
    return {
        space: Placement(offsets=offsets, size_bytes=sizes[space])
        for space, offsets in found.items()
    }


def unplanned(program: Program) -> Program:
    """The program without places for its buffers."""
    if all(buffer.offset is None for buffer in program.buffers):
        return program
    buffers = tuple(replace(buffer, offset=None) for buffer in program.buffers)
    return replace(program, buffers=buffers)


def place_all(program: Program) -> Mapping[Space, Placement]:
    """The placement of every space that has temporary buffers; no two that may be live at once overlap."""
    found = Lifetimes.of(program)
    buffers = {b.name: b for b in program.buffers if not b.is_persistent}
    sizes = [rounded(buffers[name].size_bytes) for name in found.buffers]
    spaces: dict[Space, list[int]] = {}
    for life, name in enumerate(found.buffers):
        spaces.setdefault(buffers[name].space, []).append(life)
    placed = {space: _place(found, lives, sizes) for space, lives in spaces.items()}
    for buffer in buffers.values():
        if buffer.space not in placed or buffer.name not in placed[buffer.space].offsets:
            # Nobody ever begins it.
            here = placed.get(buffer.space, Placement(offsets={}, size_bytes=0))
            size = max(here.size_bytes, rounded(buffer.size_bytes))
            offsets = {**here.offsets, buffer.name: 0}
            placed[buffer.space] = replace(here, offsets=offsets, size_bytes=size)
    return {space: placed[space] for space in Space if space in placed}


def rounded(size_bytes: int) -> int:
    """The bytes that a buffer takes in a block."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _place(found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> Placement:
    """The best placement of those lives; ``sizes`` are the bytes of every life."""
    field = _Field.of(found, lives, sizes)
    bound = most_live(found, lives, sizes).size_bytes
    close = bound * (CLOSE if len(field.names) <= _FEW else 1.01)
    best = Placement(offsets={}, size_bytes=-1)
    most = min(max(_WORK // len(field.names), 1), _MOST_ATTEMPTS)
    for number, offsets in enumerate(islice(_attempts(field), most)):
        size = max(offset + field.sizes[at] for at, offset in enumerate(offsets))
        if best.size_bytes < 0 or size < best.size_bytes:
            named = dict(zip(field.names, offsets, strict=True))
            best = Placement(offsets=named, size_bytes=size, live_bytes=bound)
        if best.size_bytes <= (close if number < _CHANGES_FROM else bound * 1.01):
            break
    return best


def _attempts(field: _Field) -> Iterator[Sequence[int]]:
    """Placements, the likeliest to be tight first."""
    sizes, spans = field.sizes, field.spans
    keys: Sequence[Callable[[int], tuple[int, int, int]]] = (
        lambda at: (-sizes[at], -spans[at], at),
        lambda at: (-sizes[at] * spans[at], -sizes[at], at),
        lambda at: (-spans[at], -sizes[at], at),
        lambda at: (at, 0, 0),
    )
    least: tuple[int, bool, list[int]] | None = None
    for has_floor in (False, True) if len(sizes) <= _FEW else (True,):
        for key in keys:
            order = sorted(range(len(sizes)), key=key)
            offsets = _Layout(field).run(order, has_floor=has_floor)
            yield offsets
            size = max(offset + sizes[at] for at, offset in enumerate(offsets))
            if least is None or size < least[0]:
                least = size, has_floor, order
    # What stands out goes first, and the rest is placed anew.
    assert least is not None
    _, has_floor, order = least
    order = list(order)
    for _ in range(_RETRIES):
        offsets = _Layout(field).run(order, has_floor=has_floor)
        yield offsets
        size = max(offset + sizes[at] for at, offset in enumerate(offsets))
        if size < least[0]:
            least = size, has_floor, list(order)
        top = max(order, key=lambda at: offsets[at] + sizes[at])
        order.remove(top)
        order.insert(0, top)
    # Then small changes of the best order, as long as that does not get worse; the same ones every time.
    chance = random.Random(0)
    while True:
        limit, has_floor, best = least
        order = list(best)
        for _ in range(chance.randrange(1, 4)):
            order.insert(chance.randrange(len(order)), order.pop(chance.randrange(len(order))))
        offsets = _Layout(field).run(order, has_floor=has_floor)
        yield offsets
        size = max(offset + sizes[at] for at, offset in enumerate(offsets))
        if size <= limit:
            least = size, has_floor, order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """What is to be placed, prepared for many attempts.

    Of every buffer, in the order of first lives: its name, its bytes, its lives, and how long these last. Lives are
    numbered anew, in the order of their beginnings: ``buffer_of`` is the buffer of each, ``windows`` when it begins and
    when every stream knows that it ended. ``later[s]`` are, for each life, the bounds in ``begun[s]``, the lives that
    the s-th stream begins, of those which begin after it and may meet it.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    lives: Sequence[Sequence[int]]
    spans: Sequence[int]
    buffer_of: Sequence[int]
    windows: Sequence[tuple[int, int]]
    begun: Sequence[Sequence[int]]
    later: Sequence[tuple[Sequence[int], Sequence[int]]]
    stop: int

    @classmethod
    def of(cls, found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> _Field:
        """Prepare these lives."""
        import numpy as np

        chosen = np.array(lives)
        first = np.array(found.firsts)[chosen]
        stream = np.array(found.streams)[chosen]
        used = sorted({found.streams[i] for i in lives})
        free = {s: np.array(found.free_from[s])[chosen] for s in used}
        until = np.maximum.reduce(list(free.values()))
        begun: list[list[int]] = []
        later: list[tuple[list[int], list[int]]] = []
        for s in used:
            of_stream = stream == s
            here = np.flatnonzero(of_stream)
            begun.append(here.tolist())
            begin = np.cumsum(of_stream)
            end = np.searchsorted(first[here], free[s], side="left")
            later.append((begin.tolist(), np.maximum(begin, end).tolist()))
        names: dict[str, int] = {}
        buffer_of = [names.setdefault(found.buffers[i], len(names)) for i in lives]
        own: list[list[int]] = [[] for _ in names]
        spans, bytes_of = [0] * len(names), [0] * len(names)
        windows = list(zip(first.tolist(), until.tolist(), strict=True))
        for life, at in enumerate(buffer_of):
            own[at].append(life)
            spans[at] += found.lasts[lives[life]] - windows[life][0]
            bytes_of[at] = sizes[lives[life]]
        return cls(
            names=list(names),
            sizes=bytes_of,
            lives=own,
            spans=spans,
            buffer_of=buffer_of,
            windows=windows,
            begun=begun,
            later=later,
            stop=found.stop,
        )


_Range = tuple[int, int]


class _Layout:
    """One placement, buffer by buffer.

    Of two lives that may meet, the one placed first tells the other: an earlier one by ``told``, a later one by its
    place in ``seen``, the lives that each stream begins.
    """

    def __init__(self, field: _Field) -> None:
        self._field = field
        self._seen: list[list[_Range | None]] = [[None] * len(begun) for begun in field.begun]
        self._told: list[list[_Range] | None] = [None] * len(field.buffer_of)
        self._place_of: list[tuple[int, int]] = [(0, 0)] * len(field.buffer_of)
        for stream, begun in enumerate(field.begun):
            for at, life in enumerate(begun):
                self._place_of[life] = (stream, at)
        self._offsets = [-1] * len(field.names)

    def run(self, order: Sequence[int], *, has_floor: bool) -> Sequence[int]:
        """The offset of every buffer, placed in this order; with a floor, what nests goes first."""
        height = self._lay_floor() if has_floor else None
        for at in order:
            if self._offsets[at] < 0:
                floor = 0
                if height is not None:
                    for life in self._field.lives[at]:
                        first, until = self._field.windows[life]
                        floor = max(floor, int(height[first:until].max()))
                self._settle(at, self._best_gap(at, floor))
        return self._offsets

    def _lay_floor(self) -> NDArray[np.int64]:
        """Place long lives that stand level on those below them; how high these then reach at each moment."""
        from zeroir.ir.skyline import Skyline

        field = self._field
        skyline = Skyline(field.stop)
        shortest = max(32 * field.stop // len(field.buffer_of), 64)
        long = [at for at, span in enumerate(field.spans) if span >= shortest]
        for at in sorted(long, key=lambda at: (-field.spans[at], at)):
            windows = [field.windows[life] for life in field.lives[at]]
            base = skyline.raise_level(windows, field.sizes[at])
            if base is not None:
                self._offsets[at] = base
        return skyline.heights()

    def _settle(self, at: int, offset: int) -> None:
        self._offsets[at] = offset
        field, told = self._field, self._told
        taken = (offset, offset + field.sizes[at])
        for life in field.lives[at]:
            stream, number = self._place_of[life]
            self._seen[stream][number] = taken
            for begun, (begin, end) in zip(field.begun, field.later, strict=True):
                for other in begun[begin[life] : end[life]]:
                    known = told[other]
                    if known is None:
                        told[other] = [taken]
                    else:
                        known.append(taken)

    def _best_gap(self, at: int, floor: int) -> int:
        """The start of the smallest gap that the buffer fits, else the end of all that it may meet."""
        field = self._field
        taken: list[_Range] = []
        for life in field.lives[at]:
            taken += self._told[life] or ()
            for seen, (begin, end) in zip(self._seen, field.later, strict=True):
                taken += filter(None, seen[begin[life] : end[life]])
        taken.sort()
        size, stop = field.sizes[at], floor
        best, found = -1, 0
        for start, end_of in taken:
            if start > stop:
                gap = start - stop
                if gap >= size and (best < 0 or gap < best):
                    best, found = gap, stop
            if end_of > stop:
                stop = end_of
        return stop if best < 0 else found
