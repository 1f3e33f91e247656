"""Temporary copies of regions at rest: which elements of a persistent buffer a temporary one stands for.

An optimizer step finds groups, parameters and padding by the places of its elements in a buffer at rest. Where it works
on a temporary copy, the transfers that fill and empty the copy say which elements these are. This says where elements
belong, not what they hold: whoever relies on their values proves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zeroir.ir import ops
from zeroir.ir.buffers import Region, Space, part_of
from zeroir.ir.ops import Op

if TYPE_CHECKING:
    from zeroir.ir.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOf:
    """The elements of another buffer that a buffer stands for.

    Element ``i`` stands for element ``i + shift`` of ``buffer``. With ``slice`` the buffer's elements are instead those
    of this rank's slice of that region, in order.
    """

    buffer: str
    shift: int = 0
    slice: Region | None = None


def copies(body: Iterable[Op], temporary: Mapping[str, int]) -> Mapping[str, CopyOf]:
    """For each temporary buffer what it is a copy of; ``temporary`` has their numbers of elements.

    Each transfer of a buffer must say the same; a buffer that stands for different elements in turn is left out.
    """
    copy_of: dict[str, CopyOf | None] = {}
    for op in body:
        if not isinstance(op, ops.Transfer):
            continue
        near, far = op.source, op.destination
        if _DISTANCE[op.from_space] > _DISTANCE[op.to_space]:
            near, far = far, near
        # Of two temporary buffers, the one nearer to the device stands for the other.
        if near.buffer in temporary:
            own, other = near, far
        elif far.buffer in temporary:
            own, other = far, near
        else:
            continue
        copy = _copy_of(own, other, temporary[own.buffer])
        if copy_of.setdefault(own.buffer, copy) != copy:
            copy_of[own.buffer] = None
    return {name: copy for name, copy in copy_of.items() if copy is not None}


_DISTANCE: Final = {Space.DEVICE: 0, Space.HOST: 1, Space.DISK: 2}
"""The number of transfers that a space is away from the device."""


def _copy_of(own: Region, other: Region, numel: int) -> CopyOf | None:
    if (own.shard, own.part) == (other.shard, other.part):
        return CopyOf(buffer=other.buffer, shift=other.offset - own.offset)
    if _is_plain(own) and (own.offset, own.numel) == (0, numel):
        return CopyOf(buffer=other.buffer, slice=other)
    return None


def at_rest(program: Program, region: Region) -> Region | None:
    """The region of a persistent buffer whose elements a region stands for: itself, or what it is a copy of.

    It has as many elements on each rank. None where the region is no copy, or a slice of a copy of a slice.
    """
    while not program.buffer_by_name[region.buffer].is_persistent:
        copy = program.copies.get(region.buffer)
        if copy is None:
            return None
        if copy.slice is None:
            region = replace(region, buffer=copy.buffer, offset=region.offset + copy.shift)
        elif not _is_plain(region):
            return None
        elif region.numel == copy.slice.local_numel(program.mesh):
            region = copy.slice
        else:
            region = part_of(copy.slice, region.offset, region.stop)
    return region


def _is_plain(region: Region) -> bool:
    return region.shard is None and region.part is None
