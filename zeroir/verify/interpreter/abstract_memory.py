"""The abstract memory: the value of each element of each buffer, on all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from zeroir.ir.buffers import Buffer, Region
from zeroir.ir.mesh import Mesh
from zeroir.verify.interpreter.domain import (
    TORN,
    UNWRITTEN,
    PieceList,
    Pieces,
    Slice,
    Split,
    Value,
    coalesced,
    cut,
    moved,
    pack,
    rebased,
    simplify,
    unpack,
    window,
)
from zeroir.verify.interpreter.intervals import IntervalMap


class AbstractMemory:
    """Buffers by name. Reads return, and writes take, pieces with positions relative to the start of a region."""

    def __init__(self, buffers: Mapping[str, Buffer], mesh: Mesh) -> None:
        self._buffers = buffers
        self._maps: dict[str, IntervalMap[Value]] = {}
        self.sizes = {axis.name: axis.size for axis in mesh.axes}

    def forget(self, name: str) -> None:
        """Discard the contents of a buffer, where it begins or ends: it counts as unwritten."""
        self._maps.pop(name, None)

    def _map(self, name: str) -> IntervalMap[Value]:
        values = self._maps.get(name)
        if values is None:
            values = self._maps[name] = IntervalMap(self._buffers[name].numel, UNWRITTEN)
        return values

    def numel(self, region: Region) -> int:
        """Return the number of elements of the region on one rank."""
        if region.part is not None:
            return region.part[1] - region.part[0]
        return region.numel if region.shard is None else region.numel // self.sizes[region.shard]

    def read(self, region: Region) -> PieceList:
        """Return the pieces of the region."""
        if region.part is not None:
            return window(self.read(replace(region, part=None)), region.part[0], self.numel(region))
        start, stop = region.offset, region.offset + region.numel
        pieces = self._map(region.buffer).read(start, stop)
        axis = region.shard
        if axis is not None and self.sizes[axis] > 1:
            return self._read_slice(pieces, axis, start, stop)
        local = rebased(pieces, start)
        for i, (a, b, value) in enumerate(local):
            if isinstance(value, Split) and (value.start, value.stop) != (a, b):
                local[i] = (a, b, TORN)
        return local

    def _read_slice(self, pieces: PieceList, axis: str, start: int, stop: int) -> PieceList:
        numel = (stop - start) // self.sizes[axis]
        if len(pieces) == 1:
            value = pieces[0][2]
            if _is_split_alike(value, axis, start, stop):
                return unpack(value.own, numel)
            return unpack(moved(value, start, ((axis, numel),)), numel)
        array = _with_torn_splits(rebased(pieces, start))
        return [(0, numel, simplify(Slice(array, 0, ((axis, numel),)), numel, self.sizes))]

    def write(self, region: Region, pieces: PieceList) -> None:
        """Write pieces that cover ``[0, local numel)`` to the region."""
        if region.part is not None:
            self._write_part(replace(region, part=None), region.part, pieces)
            return
        start, stop = region.offset, region.offset + region.numel
        kept = self._map(region.buffer)
        axis = region.shard
        if axis is not None and self.sizes[axis] > 1:
            pieces = self._split(kept.read(start, stop), pack(pieces), axis, start, stop)
        self._tear(kept, start, stop)
        for a, b, value in pieces:
            kept.write(start + a, start + b, moved(value, -start))

    def _write_part(self, region: Region, part: tuple[int, int], pieces: PieceList) -> None:
        """Write pieces to elements ``part`` of a rank's part of the region; the others are unchanged."""
        start, stop = part
        there = self.read(region)
        behind = cut(there, stop, self.numel(region))
        self.write(region, coalesced([*cut(there, 0, start), *rebased(pieces, -start), *behind]))

    def _split(self, here: PieceList, own: Value, axis: str, start: int, stop: int) -> PieceList:
        """Return the pieces of a region, relative to its start, after this rank's slice of them became ``own``."""
        rest = _with_torn_splits(rebased(here, start))
        if len(here) == 1 and _is_split_alike(here[0][2], axis, start, stop):
            rest = here[0][2].rest
        numel = stop - start
        if pack(self._read_slice(coalesced(rest), axis, 0, numel)) == own:
            return rest
        return [(0, numel, Split(axis, 0, numel, own, rest))]

    @staticmethod
    def _tear(kept: IntervalMap[Value], start: int, stop: int) -> None:
        """Mark a split that a write partly covers as torn: nothing is known about the remaining part."""
        if kept.starts == [0] and not isinstance(kept.values[0], Split):
            return
        for at in (start, max(stop - 1, start)):
            if at >= kept.numel:
                continue
            ((_, _, value),) = kept.read(at, at + 1)
            if isinstance(value, Split) and (value.start < start or value.stop > stop):
                kept.write(value.start, value.stop, TORN)


def _is_split_alike(value: Value, axis: str, start: int, stop: int) -> TypeGuard[Split]:
    """Return whether the value is a split of ``[start, stop)`` along the axis."""
    return isinstance(value, Split) and (value.axis, value.start, value.stop) == (axis, start, stop)


def _with_torn_splits(pieces: PieceList) -> Pieces:
    return tuple((a, b, TORN if isinstance(v, Split) else v) for a, b, v in pieces)
