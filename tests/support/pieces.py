"""Segments, flats and ops of programs made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroir.ir.buffers import Region, View, contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Alloc, Fill, Release
from zeroir.ir.program import (
    PARAMETER_ALIGNMENT_NUMEL,
    SHARD_ALIGNMENT_NUMEL,
    Flat,
    Slot,
)
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType


def tensor(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype=dtype, shape=shape, stride=contiguous_stride(shape))


@dataclass
class SegmentBuilder:
    """Number values as they come: inputs first, then one result a node."""

    name: str
    inputs: list[TensorType]
    nodes: list[Node] = field(default_factory=list)
    kinds: list[TensorType] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = list(self.inputs)

    def add(
        self, op: str, *args: NodeArg, result: TensorType, flops: int = 0, **kwargs: NodeArg
    ) -> Ref:
        self.nodes.append(
            Node(op=op, args=args, kwargs=tuple(kwargs.items()), results=(result,), flops=flops)
        )
        self.kinds.append(result)
        return Ref(len(self.kinds) - 1)

    def t(self, value: Ref) -> Ref:
        kind = self.kinds[value.index]
        flipped = TensorType(dtype=kind.dtype, shape=kind.shape[::-1], stride=kind.stride[::-1])
        return self.add("aten.t.default", value, result=flipped)

    def mm(self, a: Ref, b: Ref) -> Ref:
        (m, k), (_, n) = self.kinds[a.index].shape, self.kinds[b.index].shape
        kind = tensor(self.kinds[a.index].dtype, m, n)
        return self.add("aten.mm.default", a, b, result=kind, flops=2 * m * n * k)

    def cast(self, value: Ref, dtype: DType) -> Ref:
        kind = self.kinds[value.index]
        if kind.dtype is dtype:
            return value
        return self.add(
            "aten._to_copy.default", value, result=tensor(dtype, *kind.shape), dtype=dtype
        )

    def same(self, op: str, *args: NodeArg) -> Ref:
        first = next(arg for arg in args if isinstance(arg, Ref))
        return self.add(
            op, *args, result=tensor(self.kinds[first.index].dtype, *self.kinds[first.index].shape)
        )

    def build(self, *outputs: Ref) -> Segment:
        return Segment(
            name=self.name,
            inputs=tuple(self.inputs),
            nodes=tuple(self.nodes),
            outputs=tuple(output.index for output in outputs),
            workspace_bytes=(("eager", 0),),
        )


def flat(
    name: str,
    unit: str,
    dtype: DType,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, tuple[str, ...]],
) -> Flat:
    slots: list[Slot] = []
    offset = 0
    for parameter, shape in shapes.items():
        slot = Slot(name=parameter, offset=offset, shape=shape, aliases=aliases.get(parameter, ()))
        slots.append(slot)
        offset += -(-slot.numel // PARAMETER_ALIGNMENT_NUMEL) * PARAMETER_ALIGNMENT_NUMEL
    used = slots[-1].offset + slots[-1].numel
    padded = -(-used // SHARD_ALIGNMENT_NUMEL) * SHARD_ALIGNMENT_NUMEL
    return Flat(
        name=name,
        unit=unit,
        dtype=dtype,
        is_trainable=True,
        padded_numel=padded,
        slots=tuple(slots),
    )


def alloc(name: str) -> Alloc:
    return Alloc(buffer=name, stream=COMPUTE)


def release(name: str) -> Release:
    return Release(buffer=name, stream=COMPUTE)


def fill(name: str, numel: int) -> Fill:
    return Fill(destination=Region(buffer=name, offset=0, numel=numel), value=0.0, stream=COMPUTE)


def one(name: str) -> Region:
    return Region(buffer=name, offset=0, numel=1)


def dense(name: str, shape: tuple[int, ...], offset: int = 0) -> View:
    numel = 1
    for size in shape:
        numel *= size
    region = Region(buffer=name, offset=offset, numel=numel)
    return View(region=region, shape=shape, stride=contiguous_stride(shape))
