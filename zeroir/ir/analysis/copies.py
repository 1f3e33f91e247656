"""Temporary copies of regions at rest: the elements of a persistent buffer that a temporary one corresponds to.

An optimizer step finds groups, parameters and padding by the places of its elements in a buffer at rest. Where it works
on a temporary copy, the transfers that fill and empty the copy determine which elements these are. This module only
determines the correspondence, not the values, which the verifier proves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Space, part_of, whole
from zeroir.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOf:
    """The elements of a persistent buffer that a temporary one corresponds to.

    Element ``i`` corresponds to element ``i + shift`` of ``buffer``. With ``slice`` the elements are instead those of
    that region of the buffer on this rank, in order.
    """

    buffer: str
    shift: int = 0
    slice: Region | None = None

    def region(self, region: Region, mesh: Mesh) -> Region | None:
        """Return the region of the persistent buffer that a region of the temporary one corresponds to.

        Return None for a slice of a copy of a slice, which no region can express.
        """
        if self.slice is None:
            return replace(region, buffer=self.buffer, offset=region.offset + self.shift)
        if not _is_plain(region):
            return None
        if region.numel == self.slice.local_numel(mesh):
            return self.slice
        return part_of(self.slice, region.offset, region.stop)


def copies(
    transfers: Iterable[ops.Transfer], buffers: Mapping[str, Buffer], mesh: Mesh
) -> Mapping[str, CopyOf]:
    """Return for each temporary buffer what it is a copy of.

    All transfers of a buffer must agree; a buffer that corresponds to different elements in turn is omitted.
    """
    copy_of: dict[str, CopyOf | None] = {}
    for own, original in _pairs(transfers, buffers):
        resting: Region | None = original
        if not buffers[original.buffer].is_persistent:
            copied = copy_of.get(original.buffer)
            resting = None if copied is None else copied.region(original, mesh)
        own_buffer = buffers[own.buffer]
        copy = None if resting is None else _copy_of(own, resting, own == whole(own_buffer))
        if copy_of.setdefault(own.buffer, copy) != copy:
            copy_of[own.buffer] = None
    return {name: copy for name, copy in copy_of.items() if copy is not None}


_DISTANCE: Final = {Space.DEVICE: 0, Space.HOST: 1, Space.DISK: 2}
"""The number of transfers between a space and the device."""


def _pairs(
    transfers: Iterable[ops.Transfer], buffers: Mapping[str, Buffer]
) -> Iterator[tuple[Region, Region]]:
    """Yield the regions of temporary buffers that transfers fill and empty, each with the region it corresponds to.

    Of two temporary buffers, the one nearer to the device corresponds to the other, which comes first.
    """
    for op in sorted(transfers, key=lambda op: -_DISTANCE[op.from_space] - _DISTANCE[op.to_space]):
        near, far = op.source, op.destination
        if _DISTANCE[op.from_space] > _DISTANCE[op.to_space]:
            near, far = far, near
        if not buffers[near.buffer].is_persistent:
            yield near, far
        elif not buffers[far.buffer].is_persistent:
            yield far, near


def _copy_of(own: Region, original: Region, is_whole: bool) -> CopyOf | None:
    if (own.shard, own.part) == (original.shard, original.part) and own.numel == original.numel:
        return CopyOf(buffer=original.buffer, shift=original.offset - own.offset)
    return CopyOf(buffer=original.buffer, slice=original) if is_whole else None


def _is_plain(region: Region) -> bool:
    return region.shard is None and region.part is None
