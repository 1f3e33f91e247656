"""The abstract memory: which value each element of each buffer holds, on every rank at once."""

from __future__ import annotations

from collections.abc import Mapping

from zeroir.ir.buffers import Buffer, Region
from zeroir.ir.mesh import Mesh
from zeroir.verify.domain import (
    TORN,
    UNWRITTEN,
    PieceList,
    Slice,
    Split,
    Value,
    moved,
    pack,
    rebased,
    simplify,
    unpack,
    with_stride,
)
from zeroir.verify.intervals import IntervalMap


class AbstractMemory:
    """Buffers by name. Reads return, and writes take, pieces counted from the start of a region."""

    def __init__(self, buffers: Mapping[str, Buffer], mesh: Mesh) -> None:
        self._buffers = buffers
        self._maps: dict[str, IntervalMap[Value]] = {}
        self.sizes = {axis.name: axis.size for axis in mesh.axes}
        self._sizes_items = tuple(self.sizes.items())

    def reset(self, name: str) -> None:
        """Begin a buffer anew, with nothing written in it."""
        self._maps[name] = IntervalMap(self._buffers[name].numel, UNWRITTEN)

    def forget(self, name: str) -> None:
        """Drop a buffer that was released."""
        self._maps.pop(name, None)

    def _map(self, name: str) -> IntervalMap[Value]:
        values = self._maps.get(name)
        if values is None:
            values = self._maps[name] = IntervalMap(self._buffers[name].numel, UNWRITTEN)
        return values

    def numel(self, region: Region) -> int:
        """Elements of the region on one rank."""
        return region.numel if region.shard is None else region.numel // self.sizes[region.shard]

    def read(self, region: Region) -> PieceList:
        """The pieces of the region."""
        start, stop = region.offset, region.offset + region.numel
        pieces = self._map(region.buffer).read(start, stop)
        axis = region.shard
        if axis is not None and self.sizes[axis] > 1:
            return self._read_slice(pieces, axis, start, stop)
        if len(pieces) == 1 and start == 0:
            value = pieces[0][2]
            if not isinstance(value, Split):
                return pieces
        local = rebased(pieces, start)
        for i, (a, b, value) in enumerate(local):
            if isinstance(value, Split) and (value.start, value.stop) != (a, b):
                local[i] = (a, b, TORN)
        return local

    def _read_slice(
        self, pieces: list[tuple[int, int, Value]], axis: str, start: int, stop: int
    ) -> PieceList:
        numel = (stop - start) // self.sizes[axis]
        if len(pieces) == 1:
            value = pieces[0][2]
            if isinstance(value, Split):
                is_same = (value.axis, value.start, value.stop) == (axis, start, stop)
                return unpack(value.own, numel) if is_same else [(0, numel, TORN)]
            return unpack(with_stride(moved(value, start), axis, numel), numel)
        array = tuple(
            (a, b, TORN if isinstance(v, Split) else v) for a, b, v in rebased(pieces, start)
        )
        value = simplify(Slice(array, 0, ((axis, numel),)), numel, self._sizes_items)
        return [(0, numel, value)]

    def write(self, region: Region, pieces: PieceList) -> None:
        """Put pieces that cover ``[0, local numel)`` into the region."""
        start, stop = region.offset, region.offset + region.numel
        kept = self._map(region.buffer)
        axis = region.shard
        if axis is not None and self.sizes[axis] > 1:
            self._write_slice(kept, region, axis, pieces)
            return
        self._tear(kept, start, stop)
        if len(pieces) == 1:
            kept.write(start, stop, moved(pieces[0][2], -start))
            return
        for a, b, value in pieces:
            kept.write(start + a, start + b, moved(value, -start))

    def _write_slice(
        self, kept: IntervalMap[Value], region: Region, axis: str, pieces: PieceList
    ) -> None:
        start, stop = region.offset, region.stop
        here = kept.read(start, stop)
        own = pack(pieces)
        if len(here) == 1 and isinstance(here[0][2], Split):
            old = here[0][2]
            rest = (
                old.rest
                if (old.axis, old.start, old.stop) == (axis, start, stop)
                else ((0, stop - start, TORN),)
            )
        else:
            rest = tuple(
                (a, b, TORN if isinstance(v, Split) else v) for a, b, v in rebased(here, start)
            )
        self._tear(kept, start, stop)
        unsplit = IntervalMap[Value](stop - start, UNWRITTEN)
        for a, b, value in rest:
            unsplit.write(a, b, value)
        as_slice = self._read_slice(unsplit.read(0, stop - start), axis, 0, stop - start)
        if pack(as_slice) == own:
            for a, b, value in rest:
                kept.write(start + a, start + b, moved(value, -start))
            return
        kept.write(start, stop, Split(axis, start, stop, own, rest))

    @staticmethod
    def _tear(kept: IntervalMap[Value], start: int, stop: int) -> None:
        """Mark a split that a write covers in part as torn: nothing is known about the part that stays."""
        if kept.starts == [0] and not isinstance(kept.values[0], Split):
            return
        for at in (start, max(stop - 1, start)):
            if at >= kept.numel:
                continue
            ((_, _, value),) = kept.read(at, at + 1)
            if isinstance(value, Split) and (value.start < start or value.stop > stop):
                kept.write(value.start, value.stop, TORN)
