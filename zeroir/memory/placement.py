"""Where temporary buffers stand in one block of memory per space: a place each, for the whole run of a program.

Two buffers may share memory where, in every section that both live in, the end of one happens before the beginning of
the other, by streams and waits and not merely in the program's text: then no stream can run so far ahead or so late
that they meet. What can be live at once in some legal order of ops is a bound that no placement can beat; buffers are
placed (see ``zeroir.memory.fit``) and moved until they take little more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live

if TYPE_CHECKING:
    from zeroir.memory.field import Field
    from zeroir.memory.fit import Layout

ALIGNMENT_BYTES: Final = 512
"""Every buffer starts on a multiple of this, as CUDA's allocator would have it."""

CLOSE: Final = 0.001
"""A placement that takes so little more than can be live at once ends the search."""

CLOSE_ENOUGH: Final = 0.01
"""One that takes no more than this is moved only as long as that is easy."""

_FEW: Final = 2_000
"""Beyond so many buffers a floor is laid at once, one placement is made, and less is tried to better it."""

_STEPS: Final = 800
_EASY_TRIES: Final = 2
_TRIES: Final = 30
_TRIES_OF_MANY: Final = 4
_ROOTS: Final = (2, None, 1)


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


def places_to_run(program: Program) -> Mapping[Space, Placement]:
    """The places that the program's own plan gives, or else such as are found at once; ``live_bytes`` is 0."""
    return planned(program) or place_soon(program)


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


def placements_with_bound(program: Program) -> Mapping[Space, Placement]:
    """The places of the program's own plan, or of ``place_all``, and what can be live at once beside them."""
    placed = planned(program)
    if placed is None:
        return place_all(program)
    found = Lifetimes.of(program)
    sizes = _rounded_sizes(program, found)
    return {
        space: replace(placement, live_bytes=most_live(found, lives, sizes).size_bytes)
        for space, lives in _lives_by_space(program, found).items()
        for placement in [placed[space]]
    }


def unplaced(program: Program) -> Mapping[Space, Placement]:
    """No places, but what can be live at once: of every space's placements none takes less than ``size_bytes`` here."""
    found = Lifetimes.of(program)
    sizes = _rounded_sizes(program, found)
    live = {
        space: most_live(found, lives, sizes).size_bytes
        for space, lives in _lives_by_space(program, found).items()
    }
    return {
        space: Placement(offsets={}, size_bytes=size, live_bytes=size)
        for space, size in live.items()
    }


def unplanned(program: Program) -> Program:
    """The program without places for its buffers."""
    if all(buffer.offset is None for buffer in program.buffers):
        return program
    buffers = tuple(replace(buffer, offset=None) for buffer in program.buffers)
    return replace(program, buffers=buffers)


def place_all(program: Program) -> Mapping[Space, Placement]:
    """The placement of every space that has temporary buffers; no two that may be live at once overlap."""
    return _place_spaces(program, _place)


def place_soon(program: Program) -> Mapping[Space, Placement]:
    """Such a placement as is found at once, however much it takes; ``live_bytes`` is 0."""
    return _place_spaces(program, _place_once)


def rounded(size_bytes: int) -> int:
    """The bytes that a buffer takes in a block."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


_Place = Callable[[Lifetimes, Sequence[int], Sequence[int]], Placement]


def _place_spaces(program: Program, place: _Place) -> Mapping[Space, Placement]:
    found = Lifetimes.of(program)
    buffers = {b.name: b for b in program.buffers if not b.is_persistent}
    sizes, spaces = _rounded_sizes(program, found), _lives_by_space(program, found)
    placed = {space: place(found, lives, sizes) for space, lives in spaces.items()}
    for buffer in buffers.values():
        if buffer.space not in placed or buffer.name not in placed[buffer.space].offsets:
            # Nobody ever begins it.
            here = placed.get(buffer.space, Placement(offsets={}, size_bytes=0))
            size = max(here.size_bytes, rounded(buffer.size_bytes))
            offsets = {**here.offsets, buffer.name: 0}
            placed[buffer.space] = replace(here, offsets=offsets, size_bytes=size)
    return {space: placed[space] for space in Space if space in placed}


def _rounded_sizes(program: Program, found: Lifetimes) -> list[int]:
    """What each life takes."""
    sizes = {b.name: rounded(b.size_bytes) for b in program.buffers if not b.is_persistent}
    return [sizes[name] for name in found.buffers]


def _lives_by_space(program: Program, found: Lifetimes) -> dict[Space, list[int]]:
    spaces: dict[Space, list[int]] = {}
    for life, name in enumerate(found.buffers):
        spaces.setdefault(program.buffer_by_name[name].space, []).append(life)
    return spaces


def _place_once(found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> Placement:
    from zeroir.memory.field import Field
    from zeroir.memory.fit import Layout

    field = Field.of(found, lives, sizes)
    layout = Layout(field, has_floor=len(field.names) > _FEW)
    layout.sweep()
    return _named(field, layout, 0)


def _place(found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> Placement:
    """The best placement of those lives; ``sizes`` are the bytes of every life."""
    from zeroir.memory.field import Field
    from zeroir.memory.fit import Layout

    bound = most_live(found, lives, sizes).size_bytes
    field = Field.of(found, lives, sizes)
    if len(field.names) > _FEW:
        layout = Layout(field, has_floor=True)
        layout.sweep()
        _lower(layout, bound, _TRIES_OF_MANY)
        return _named(field, layout, bound)
    close = bound * (1 + CLOSE)
    tried: list[Layout] = []
    for has_floor in (True, False):
        layout = Layout(field, has_floor=has_floor)
        _place_in_the_best_order(field, layout, close)
        _lower(layout, bound, _EASY_TRIES)
        if layout.size_bytes <= close:
            return _named(field, layout, bound)
        tried.append(layout)
    layout = min(tried, key=lambda one: one.size_bytes)
    _lower(layout, bound, _TRIES)
    return _named(field, layout, bound)


def _named(field: Field, layout: Layout, live_bytes: int) -> Placement:
    offsets = dict(zip(field.names, layout.offsets.tolist(), strict=True))
    return Placement(offsets=offsets, size_bytes=layout.size_bytes, live_bytes=live_bytes)


def _place_in_the_best_order(field: Field, layout: Layout, close: float) -> None:
    """Place the largest first, or what takes most room over time, or what lives longest; or as they begin or end."""
    sizes, spans = field.sizes.tolist(), field.spans.tolist()
    untils = field.untils.tolist()
    ends = [max(untils[life] for life in lives) for lives in field.lives]
    keys: Sequence[Callable[[int], tuple[int, int, int]]] = (
        lambda at: (-sizes[at], -spans[at], at),
        lambda at: (-sizes[at] * spans[at], -sizes[at], at),
        lambda at: (-spans[at], -sizes[at], at),
        lambda at: (at, 0, 0),
        lambda at: (-ends[at], at, 0),
    )
    best: tuple[int, list[int]] | None = None
    for key in keys:
        order = sorted(range(len(sizes)), key=key)
        layout.place(order)
        if layout.size_bytes <= close:
            return
        if best is None or layout.size_bytes < best[0]:
            best = layout.size_bytes, order
    if best is not None:
        layout.place(best[1])


def _lower(layout: Layout, bound: int, tries: int) -> None:
    """Halve what is too much until it is little or that has failed too often; the same in every run."""
    chance = random.Random(0)
    close, enough = bound * (1 + CLOSE), bound * (1 + CLOSE_ENOUGH)
    failures = 0
    while layout.size_bytes > close and failures < tries:
        if failures < _EASY_TRIES:
            aim = max(close, (bound + layout.size_bytes) / 2)
        elif layout.size_bytes > enough:
            aim = enough
        else:
            break
        limit = int(aim) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        roots = _ROOTS[failures % len(_ROOTS)]
        if layout.lower(limit, _STEPS, chance, roots=roots) < 0:
            failures += 1
