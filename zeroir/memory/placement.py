"""The places of temporary buffers in one block of memory per space: an offset each, for the whole run of a program.

Two buffers may share memory where, in every section in which both live, the end of one happens before the beginning of
the other, by streams and waits and not only in program order: then no stream can run so far ahead or so late that they
overlap. The maximum that can be live at once in some legal order of ops (``zeroir.memory.most_live``) is a lower bound
for every placement; ``zeroir.memory.first_fit`` searches for one that is close to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live

ALIGNMENT_BYTES: Final[Mapping[Space, int]] = MappingProxyType(
    {Space.DEVICE: 512, Space.HOST: 4096, Space.DISK: 4096}
)
"""Every buffer starts at a multiple of this: 512 as with CUDA's allocator, or a page as disks transfer them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Byte offsets of the temporary buffers of one space in a block of ``size_bytes``.

    ``live_bytes`` are live at once in some order of ops that the program allows, with buffers rounded up to the
    alignment: no placement needs less. They are 0 if they were not computed.
    """

    offsets: Mapping[str, int]
    size_bytes: int
    live_bytes: int = 0

    @property
    def gap(self) -> float:
        """How much larger the block is than the most bytes live at once, as a fraction of these."""
        return self.size_bytes / self.live_bytes - 1 if self.live_bytes else 0.0


def placements(program: Program) -> Mapping[Space, Placement]:
    """Return the places of the program's own plan, or else those that ``place_all`` finds."""
    return planned(program) or place_all(program)


def places_to_run(program: Program) -> Mapping[Space, Placement]:
    """Return the places of the program's own plan, or else the first that are found; ``live_bytes`` is 0."""
    return planned(program) or place_all(program, is_searched=False)


def planned(program: Program) -> Mapping[Space, Placement] | None:
    """Return the places that the program itself has for its temporary buffers, with ``live_bytes`` 0.

    None without a plan.
    """
    offsets: dict[Space, dict[str, int]] = {}
    sizes: dict[Space, int] = {}
    for buffer in program.buffers:
        if buffer.is_persistent:
            continue
        if buffer.offset is None:
            return None
        offsets.setdefault(buffer.space, {})[buffer.name] = buffer.offset
        stop = buffer.offset + rounded(buffer.size_bytes, buffer.space)
        sizes[buffer.space] = max(sizes.get(buffer.space, 0), stop)
    return {
        space: Placement(offsets=offsets[space], size_bytes=size) for space, size in sizes.items()
    }


def placements_with_bound(program: Program) -> Mapping[Space, Placement]:
    """Return the places of the program's own plan, or of ``place_all``, and the most bytes live at once."""
    own_plan = planned(program)
    if own_plan is None:
        return place_all(program)
    bounds = unplaced(program)
    return {
        space: replace(own_plan[space], live_bytes=bound.live_bytes)
        for space, bound in bounds.items()
    }


def unplaced(program: Program) -> Mapping[Space, Placement]:
    """Return no places, but lower bounds: no placement of a space needs less than ``size_bytes`` here."""
    lifetimes = Lifetimes.of(program)
    bounds: dict[Space, Placement] = {}
    for space, lives, sizes in _spaces(program, lifetimes):
        live_bytes = most_live(lifetimes, lives, sizes).size_bytes
        bounds[space] = Placement(offsets={}, size_bytes=live_bytes, live_bytes=live_bytes)
    return bounds


def unplanned(program: Program) -> Program:
    """Return the program without places for its buffers."""
    if all(buffer.offset is None for buffer in program.buffers):
        return program
    buffers = tuple(replace(buffer, offset=None) for buffer in program.buffers)
    return replace(program, buffers=buffers)


def place_all(program: Program, *, is_searched: bool = True) -> Mapping[Space, Placement]:
    """Return the placement of every space that has temporary buffers; no two that may be live at once overlap.

    Unless ``is_searched`` is True, it is the first that is found, and ``live_bytes`` is 0.
    """
    from zeroir.memory.first_fit import MOST_PLACEMENTS, BuffersToPlace, find_offsets

    lifetimes = Lifetimes.of(program)
    # A buffer that no op begins never lives: any place is fine.
    offsets = {
        space: {b.name: 0 for b in program.buffers if b.space is space and not b.is_persistent}
        for space in Space
    }
    live_bytes: dict[Space, int] = {}
    for space, lives, sizes in _spaces(program, lifetimes):
        live_bytes[space] = most_live(lifetimes, lives, sizes).size_bytes if is_searched else 0
        buffers = BuffersToPlace.of(lifetimes, lives, sizes)
        found_offsets = find_offsets(
            buffers, live_bytes[space], MOST_PLACEMENTS if is_searched else 0
        )
        offsets[space].update(zip(buffers.names, found_offsets.tolist(), strict=True))
    names = program.buffer_by_name
    return {
        space: Placement(
            offsets=places,
            size_bytes=max(
                place + rounded(names[name].size_bytes, space) for name, place in places.items()
            ),
            live_bytes=live_bytes.get(space, 0),
        )
        for space, places in offsets.items()
        if places
    }


def rounded(size_bytes: int, space: Space) -> int:
    """Return the bytes of a buffer in the block of a space."""
    alignment = ALIGNMENT_BYTES[space]
    return -(-size_bytes // alignment) * alignment


def _spaces(
    program: Program, lifetimes: Lifetimes
) -> Iterator[tuple[Space, Sequence[int], Sequence[int]]]:
    """Yield each space with live buffers, the numbers of their lives, and the bytes of every life of the program."""
    buffers = [program.buffer_by_name[name] for name in lifetimes.buffers]
    sizes = [rounded(buffer.size_bytes, buffer.space) for buffer in buffers]
    for space in Space:
        lives = [life for life, buffer in enumerate(buffers) if buffer.space is space]
        if lives:
            yield space, lives, sizes
