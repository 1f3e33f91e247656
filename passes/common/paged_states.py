"""The optimizer states that one step changes, and how they are divided between pages in host memory and the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zeroir.ir.buffers import Buffer, Region, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import SHARD_ALIGNMENT_NUMEL, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """The states that one step changes: their buffers in the order of the op, and the elements that they belong to.

    Each buffer has ``numel`` elements, or one for each few of them. ``aligned_bytes`` are those of 256 elements.
    """

    buffers: tuple[str, ...]
    dtypes: tuple[DType, ...]
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat on one rank."""
        return max(self.numels)

    @property
    def size_bytes(self) -> int:
        """Bytes of all states on one rank."""
        pairs = zip(self.numels, self.dtypes, strict=True)
        return sum(numel * dtype.itemsize_bytes for numel, dtype in pairs)

    @property
    def aligned_bytes(self) -> int:
        """Bytes of the states of 256 elements."""
        return self.size_bytes // (self.numel // SHARD_ALIGNMENT_NUMEL)

    def elements(self, index: int, start: int, stop: int) -> tuple[int, int]:
        """Return the elements of a buffer that belong to elements ``[start, stop)`` of the flat, multiples of 256."""
        share = self.numel // self.numels[index]
        return start // share, stop // share

    def page_numels(self, numel: int) -> Mapping[DType, int]:
        """Return how many elements of each dtype a page of ``numel`` elements has."""
        numels: dict[DType, int] = {}
        for index, dtype in enumerate(self.dtypes):
            start, stop = self.elements(index, 0, numel)
            numels[dtype] = numels.get(dtype, 0) + stop - start
        return numels


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStates:
    """States of which elements ``[0, host_numel)`` rest in host memory, in pages, and the others on the device."""

    states: StepStates
    page_numel: int
    host_numel: int

    def pages(self) -> Iterator[tuple[int, int]]:
        """Yield the elements of each page."""
        for start in range(0, self.host_numel, self.page_numel):
            yield start, min(start + self.page_numel, self.host_numel)

    def homes(self, program: Program) -> Mapping[str, tuple[Buffer, ...]]:
        """Return the buffers of each state at rest, by the name of its former buffer."""
        homes: dict[str, tuple[Buffer, ...]] = {}
        for index, name in enumerate(self.states.buffers):
            buffer = program.buffer_by_name[name]
            _, numel = self.states.elements(index, 0, self.host_numel)
            cut = (
                _cut(buffer, 0, numel, buffer.name, Space.HOST),
                _cut(buffer, numel, buffer.numel, self.resident(name), Space.DEVICE),
            )
            homes[name] = tuple(part for part in cut if part.numel)
        return homes

    def resident(self, name: str) -> str:
        """Return the buffer of the device's part of the state of a buffer."""
        return f"{name}.resident" if self.host_numel else name

    def resident_region(self, index: int) -> Region:
        """Return the device's part of one of the states."""
        start, stop = self.states.elements(index, self.host_numel, self.states.numel)
        return Region(
            buffer=self.resident(self.states.buffers[index]), offset=0, numel=stop - start
        )


def _cut(buffer: Buffer, start: int, stop: int, name: str, space: Space) -> Buffer:
    """Return elements ``[start, stop)`` of a buffer as a buffer at rest in a space."""
    holds = buffer.holds
    assert isinstance(holds, FlatContent)
    is_part = holds.shard is not None and stop - start < buffer.numel
    holds = replace(holds, offset=holds.offset + start, stride=buffer.numel if is_part else None)
    return replace(buffer, name=name, numel=stop - start, space=space, holds=holds)
