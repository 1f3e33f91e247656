"""Requirements of all ops on their operands: sizes, dtypes, spaces, and that each element is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from zeroir.ir.buffers import Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.verify.context import spell, title

Problem = tuple[str, str]
"""A code and a message."""


class OperandChecks:
    """Checks of regions of one program, which yield the problems of an op."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._buffers = program.buffer_by_name
        self._compared: Mapping[str, tuple[Callable[[Region], object], str, str]] = {
            "Z004": (self.dtype, "is {}", "{}"),
            "Z005": (self.numel, "has {} elements", "{}"),
            "Z006": (self.space, "is on {}", "on {}"),
        }

    def spell(self, region: Region) -> str:
        """Return the region's name for messages."""
        return spell(region, self._program)

    def dtype(self, region: Region) -> DType:
        """Return the dtype of the region's buffer."""
        return self._buffers[region.buffer].dtype

    def space(self, region: Region) -> Space:
        """Return the memory space of the region."""
        return self._buffers[region.buffer].space

    def role(self, region: Region) -> Role:
        """Return the role of the region's buffer."""
        return self._buffers[region.buffer].role

    def numel(self, region: Region) -> int:
        """Return the number of elements of the region on one rank."""
        return region.local_numel(self._program.mesh)

    def scalar(
        self, op: Op, name: str, region: Region | None, dtype: DType | None = None
    ) -> Iterator[Problem]:
        """Check that the operand ``name``, if given, is one element, of this dtype if one is given."""
        if region is None:
            return
        if self.numel(region) != 1:
            yield (
                "Z005",
                f"{title(op)} needs one element as {name}, {self.spell(region)} has {self.numel(region)}",
            )
        if dtype is not None and self.dtype(region) is not dtype:
            yield (
                "Z004",
                f"{title(op)} needs {dtype} as {name}, {self.spell(region)} is {self.dtype(region)}",
            )

    def alike(
        self, op: Op, codes: Iterable[str], first: Region, *others: Region
    ) -> Iterator[Problem]:
        """Check that regions have the same dtype (Z004), number of elements (Z005) or space (Z006), for ``codes``."""
        for region in others:
            for code in codes:
                value_of, told, told_briefly = self._compared[code]
                value, region_value = value_of(first), value_of(region)
                if value != region_value:
                    difference = f"{told.format(value)}, {self.spell(region)} {told_briefly.format(region_value)}"
                    yield code, f"{title(op)}: {self.spell(first)} {difference}"

    def floating(self, op: Op, verb: str, *regions: Region) -> Iterator[Problem]:
        """Check that regions have floating dtypes."""
        for region in regions:
            if not self.dtype(region).is_floating:
                yield "Z004", f"{title(op)} {verb} {self.spell(region)}, which is not floating"

    def in_memory(self, op: Op, *regions: Region) -> Iterator[Problem]:
        """Check that regions are on the host or the device."""
        for region in regions:
            if self.space(region) is Space.DISK:
                yield "Z006", f"{title(op)} cannot work on {self.spell(region)}, which is on disk"

    def typed(self, op: Op, region: Region, dtype: DType) -> Iterator[Problem]:
        """Check that the region has this dtype."""
        if self.dtype(region) is not dtype:
            what = f"{self.spell(region)} of {self.dtype(region)}"
            yield "Z004", f"{title(op)} uses {what}: it needs {dtype}"

    def disjoint(self, op: Op, regions: list[Region]) -> Iterator[Problem]:
        """Check that the regions, which the op writes, do not overlap."""
        if len(regions) < 2:
            return
        ordered = sorted(regions, key=lambda region: (region.buffer, region.offset))
        for first, second in pairwise(ordered):
            if first.overlaps(second):
                yield "Z010", f"{title(op)} writes elements of {self.spell(second)} twice"
                return
