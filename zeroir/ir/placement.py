"""Where temporary buffers stand in one block of memory per space: a place each, for the whole run of a program.

Two buffers may share memory where, in every section that both live in, the release of one happens before the
allocation of the other, by streams and waits and not merely in the program's text: then no stream can run so far ahead
or so late that they meet. Large buffers are placed first, each in the smallest gap that fits (best fit).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.clocks import Clock, Clocks
from zeroir.ir.program import Program, Section

ALIGNMENT_BYTES: Final = 512
"""Every buffer starts on a multiple of this, as CUDA's allocator would have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Byte offsets of the temporary buffers of one space in a block of ``size_bytes``."""

    offsets: Mapping[str, int]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """One life of a buffer: its section, the ops that begin and end it, what the first comes after.

    ``end`` is the stream of the release and how many ops of it are then done; None where the buffer outlives the
    section.
    """

    section: str
    first: int
    last: int
    begin: Clock
    end: tuple[str, int] | None


def place_all(program: Program) -> Mapping[Space, Placement]:
    """The placement of every space that has temporary buffers; no two that may be live at once overlap."""
    lives = lifetimes(program)
    spaces = {b.space for b in program.buffers if b.name in lives}
    return {space: _place(program, space, lives) for space in Space if space in spaces}


def _place(program: Program, space: Space, lives: Mapping[str, list[_Life]]) -> Placement:
    buffers = [b for b in program.buffers if b.name in lives and b.space is space]
    buffers.sort(key=lambda b: (-b.size_bytes, lives[b.name][0].first, b.name))
    offsets: dict[str, int] = {}
    placed: list[tuple[Buffer, list[_Life]]] = []
    size_bytes = 0
    for buffer in buffers:
        own = lives[buffer.name]
        taken = [
            (offsets[other.name], offsets[other.name] + _rounded(other.size_bytes))
            for other, theirs in placed
            if _may_meet(own, theirs)
        ]
        offset = _best_gap(sorted(taken), _rounded(buffer.size_bytes))
        offsets[buffer.name] = offset
        placed.append((buffer, own))
        size_bytes = max(size_bytes, offset + _rounded(buffer.size_bytes))
    return Placement(offsets=offsets, size_bytes=size_bytes)


def lifetimes(program: Program) -> Mapping[str, list[_Life]]:
    """Every life of every temporary buffer, in program order."""
    found: dict[str, list[_Life]] = {}
    for section in program.sections:
        for name, life in _lives_in(section):
            found.setdefault(name, []).append(life)
    return found


def _lives_in(section: Section) -> Iterator[tuple[str, _Life]]:
    clocks = Clocks()
    open_lives: dict[str, tuple[int, Clock]] = {name: (-1, {}) for name in section.entry.live}
    for index, op in enumerate(section.body):
        match op:
            case ops.Alloc() if op.buffer not in open_lives:
                open_lives[op.buffer] = (index, clocks.clock(op.stream))
            case ops.Release() if op.buffer in open_lives:
                first, begin = open_lives.pop(op.buffer)
                end = (op.stream, clocks.clock(op.stream).get(op.stream, 0) + 1)
                yield (
                    op.buffer,
                    _Life(section=section.name, first=first, last=index, begin=begin, end=end),
                )
            case _:
                pass
        clocks.issue(op)
    for name, (first, begin) in open_lives.items():
        last = len(section.body)
        yield name, _Life(section=section.name, first=first, last=last, begin=begin, end=None)


def _may_meet(own: list[_Life], theirs: list[_Life]) -> bool:
    return any(
        _overlap(a, b) if a.first <= b.first else _overlap(b, a)
        for a in own
        for b in theirs
        if a.section == b.section
    )


def _overlap(earlier: _Life, later: _Life) -> bool:
    """Whether the later life, in program order, may begin before the earlier has surely ended."""
    if earlier.end is None or earlier.last > later.first:
        return True
    stream, count = earlier.end
    return later.begin.get(stream, 0) < count


def _best_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap between taken ranges that holds ``size`` bytes, else the end of them all."""
    best: tuple[int, int] | None = None
    stop = 0
    for start, end in taken:
        gap = start - stop
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, stop)
        stop = max(stop, end)
    return stop if best is None else best[1]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
