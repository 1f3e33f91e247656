"""The text of regions and views in ops, without facts that buffers and segments declare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroir.ir.buffers import Region, View, contiguous_stride
from zeroir.ir.program import Program
from zeroir.ir.segment import Segment, TensorType
from zeroir.ir.text.lexical import name


@dataclass(frozen=True, kw_only=True)
class Names:
    """The text of regions and views in one program."""

    program: Program

    @cached_property
    def _whole_numel(self) -> dict[str, int]:
        return {buffer.name: buffer.numel for buffer in self.program.buffers}

    @cached_property
    def _input_types(self) -> dict[str, tuple[TensorType | None, ...]]:
        return {segment.name: segment.inputs for segment in self.program.segments}

    @cached_property
    def _output_types(self) -> dict[str, tuple[TensorType | None, ...]]:
        return {segment.name: declared_outputs(segment) for segment in self.program.segments}

    def inputs(self, segment: str) -> tuple[TensorType | None, ...]:
        """The declared types of a segment's inputs, none for an unknown segment."""
        return self._input_types.get(segment, ())

    def outputs(self, segment: str) -> tuple[TensorType | None, ...]:
        """The declared types of a segment's outputs, none for an unknown segment."""
        return self._output_types.get(segment, ())

    def region(self, region: Region) -> str:
        """``%b``, ``%b[0:64]``, ``%b[0:64]@dp`` or ``%b[0:64]@dp[8:16]``."""
        text = "%" + name(region.buffer)
        if region.shard is not None or region.part is not None:
            shard = "" if region.shard is None else f"@{name(region.shard)}"
            part = "" if region.part is None else f"[{region.part[0]}:{region.part[1]}]"
            return f"{text}[{region.offset}:{region.stop}]{shard}{part}"
        if region.offset == 0 and self._whole_numel.get(region.buffer) == region.numel:
            return text
        return f"{text}[{region.offset}:{region.stop}]"

    def view(self, view: View, declared: TensorType | None) -> str:
        """A region, and its shape where the segment does not declare the same."""
        text = self.region(view.region)
        if declared is not None and (declared.shape, declared.stride) == (view.shape, view.stride):
            return text
        return text + "{" + strided(view.shape, view.stride) + "}"


def declared_outputs(segment: Segment) -> tuple[TensorType | None, ...]:
    """The type of every output, None for one that is undefined or does not exist."""
    types = segment.types()
    return tuple(types[i] if 0 <= i < len(types) else None for i in segment.outputs)


def strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """``2,3``, and ``2,3;1,2`` where the strides are not row-major."""
    text = ",".join(map(str, shape))
    if stride == contiguous_stride(shape):
        return text
    return text + ";" + ",".join(map(str, stride))
