"""The ops of one micro-step or evaluation: every segment call, on the buffers of its arguments and results."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from zeroir.frontend.capture.captured_graph import CapturedGraph, GraphInput, InputKind, OutputName
from zeroir.frontend.capture.captured_model import CapturedEvaluation, CapturedModel
from zeroir.frontend.capture.module_tensors import TensorInfo
from zeroir.frontend.lowering.exchanges import collectives
from zeroir.frontend.lowering.segment_calls import (
    BufferSink,
    GradientSink,
    LossSink,
    OutputSink,
    SegmentCall,
    SegmentSource,
    Sink,
    StoredSink,
)
from zeroir.frontend.lowering.update import EVAL_LOSS, LOSS
from zeroir.ir.buffers import (
    Buffer,
    Region,
    Role,
    Space,
    View,
    contiguous_stride,
    span_numel,
    whole,
)
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import (
    Alloc,
    Argument,
    Cast,
    Compute,
    Destination,
    Mode,
    Op,
    Release,
)
from zeroir.ir.program import Flat, ModuleBufferBinding
from zeroir.ir.reports import Storing
from zeroir.ir.segments.segment import TensorType


@dataclass
class SegmentCallsBuilder:
    """Builds the ops of one micro-step, or of an evaluation.

    It adds the buffers that they need, apart from those of the flats, to ``buffers``, and those of module buffers and
    constants to ``bindings``.
    """

    captured: CapturedModel
    calls: Sequence[SegmentCall]
    flats: Sequence[Flat]
    evaluation: CapturedEvaluation | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)
    bindings: dict[str, ModuleBufferBinding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = {
            name: (flat, slot)
            for flat in self.flats
            for slot in flat.slots
            for name in (slot.name, *slot.aliases)
        }
        self._joint = self.captured.joint if self.evaluation is None else self.evaluation.joint
        self._inputs = {item.value: item for item in self._joint.inputs}
        self._module_buffers = {
            name: info for info in self.captured.buffers for name in (info.name, *info.aliases)
        }
        # the last call that reads the initial value of each module buffer
        self._last_read = {
            self._module_buffers[item.name].name: at
            for at, call in enumerate(self.calls)
            for source in call.sources
            if (item := self._inputs.get(source.root)) is not None and item.kind is InputKind.BUFFER
        }
        self._outputs = output_buffers(self._joint)
        self._roots: dict[int, Buffer] = {}
        self._parameters_begun: set[str] = set()
        self._name_counts: Counter[str] = Counter()
        self._ops: list[Op] = []
        self._deferred: list[Op] = []
        for info in self.captured.batch:
            self._persistent(f"input.{info.name}", info, Role.INPUT)
        if self.captured.most_sites:
            sites = TensorInfo(name="rng", dtype=DType.I64, shape=(self.captured.most_sites,))
            self._persistent("rng", sites, Role.RNG, Space.HOST)

    def ops(self) -> list[Op]:
        """Return every segment call, with the allocs before it and the releases after it."""
        last_use: dict[int, int] = {}
        saved: set[int] = set()
        for at, call in enumerate(self.calls):
            for source in call.sources:
                last_use[source.root] = at
                if call.is_backward:
                    saved.add(source.root)
        for at, call in enumerate(self.calls):
            arguments = tuple(self._argument(source) for source in call.sources)
            destinations = tuple(
                self._destination(at, sink, kind, saved)
                for sink, kind in zip(call.sinks, call.segment.output_types(), strict=True)
            )
            if call.is_exchange:
                places = [each.view.region for each in arguments]
                places += [each.view.region for each in destinations]
                self._ops += collectives(call, places.__getitem__)
            else:
                self._ops.append(
                    Compute(
                        segment=call.segment.name,
                        arguments=arguments,
                        destinations=destinations,
                        unit=call.unit,
                        stream=COMPUTE,
                    )
                )
            released = [
                self._roots[root].name
                for root in dict.fromkeys(source.root for source in call.sources)
                if root in self._roots and last_use[root] == at
            ]
            self._ops += [Release(buffer=name, stream=COMPUTE) for name in released]
        return self._ops + self._deferred

    def _destination(self, at: int, sink: Sink, kind: TensorType, saved: set[int]) -> Destination:
        """Return the destination of a result of call ``at``; append ops that must precede the call."""
        match sink:
            case StoredSink(root=root):
                call = self.calls[at]
                is_saved = root in saved and not call.is_backward
                name = self._temporary_name(call, is_saved=is_saved)
                role = Role.SAVED if is_saved else Role.ACTIVATION
                buffer = self._roots[root] = self._allocated(name, kind.dtype, kind.numel, role)
                view = View(region=whole(buffer), shape=kind.shape, stride=kind.stride)
                return Destination(view=view)
            case LossSink():
                loss = LOSS if self.evaluation is None else EVAL_LOSS
                return Destination(view=View(region=_region(loss, 0, 1), shape=(), stride=()))
            case OutputSink(name=output):
                info = TensorInfo(name=output.path, dtype=kind.dtype, shape=kind.shape)
                target = self._persistent(self._outputs[output], info, Role.OUTPUT)
                stride = contiguous_stride(kind.shape)
                return Destination(view=View(region=whole(target), shape=kind.shape, stride=stride))
            case BufferSink(buffer=name):
                target = self._module_buffer(name)
                if self._last_read.get(self._module_buffers[name].name, at) > at:
                    target = self._new_value_buffer(target)
                stride = contiguous_stride(kind.shape)
                view = View(region=whole(target), shape=kind.shape, stride=stride)
                return Destination(view=view)
            case GradientSink(parameter=name):
                return self._gradient(name)

    def _temporary_name(self, call: SegmentCall, *, is_saved: bool) -> str:
        """Return a name: the unit, ``saved``, ``h`` (forward), ``d`` (backward) or ``eval``, and a number."""
        kind = "d" if call.is_backward else "saved" if is_saved else "h"
        if self.evaluation is not None:
            kind = "eval"
        index = call.call_index
        stem = f"{call.unit}.call{index}.{kind}" if index else f"{call.unit}.{kind}"
        self._name_counts[stem] += 1
        return f"{stem}.{self._name_counts[stem] - 1}"

    def _allocated(self, name: str, dtype: DType, numel: int, role: Role) -> Buffer:
        """Return a new temporary buffer."""
        buffer = Buffer(name=name, dtype=dtype, numel=numel, space=Space.DEVICE, role=role)
        self.buffers[name] = buffer
        self._ops.append(Alloc(buffer=name, stream=COMPUTE))
        return buffer

    def _new_value_buffer(self, target: Buffer) -> Buffer:
        """Return a temporary buffer for the new value of a module buffer, which is copied after all segment calls."""
        name = f"{target.name}.new"
        new_value = self._allocated(name, target.dtype, target.numel, Role.ACTIVATION)
        self._deferred += [
            Cast(source=whole(new_value), destination=whole(target), stream=COMPUTE),
            Release(buffer=new_value.name, stream=COMPUTE),
        ]
        return new_value

    def _argument(self, source: SegmentSource) -> Argument:
        kind = source.type
        if source.parameter is not None:
            flat, slot = self._slots[source.parameter]
            return Argument(
                view=_dense(f"{flat.name}.param", slot.shape, slot.offset), parameter=slot.name
            )
        if source.root in self._roots:
            name = self._roots[source.root].name
        else:
            name = self._input_buffer(self._inputs[source.root])
        region = _region(name, source.offset, span_numel(kind.shape, kind.stride))
        return Argument(view=View(region=region, shape=kind.shape, stride=kind.stride))

    def _input_buffer(self, item: GraphInput) -> str:
        match item.kind:
            case InputKind.TANGENT:
                return "loss_scale"
            case InputKind.RNG:
                return "rng"
            case InputKind.RANK:
                info = TensorInfo(name=RANK, dtype=DType.I64, shape=(1,))
                return self._persistent(RANK, info, Role.CONSTANT).name
            case InputKind.BATCH:
                return f"input.{item.name}"
            case InputKind.BUFFER:
                return self._module_buffer(item.name).name
            case InputKind.CONSTANT:
                kind = self._joint.types[item.value]
                if kind is None:
                    raise AssertionError("a constant has a type")
                info = TensorInfo(name=item.name, dtype=kind.dtype, shape=kind.shape)
                self._bind(item.name, info, item.data)
                return self._persistent(item.name, info, Role.CONSTANT).name
            case InputKind.PARAMETER:
                raise AssertionError("parameters are bound by name")

    def _module_buffer(self, name: str) -> Buffer:
        info = self._module_buffers[name]
        self._bind(info.name, info, None)
        return self._persistent(f"buffer.{info.name}", info, Role.MODULE_BUFFER)

    def _bind(self, name: str, info: TensorInfo, data: bytes | None) -> None:
        buffer = name if data is not None else f"buffer.{name}"
        self.bindings[buffer] = ModuleBufferBinding(
            name=name, buffer=buffer, shape=info.shape, data=data
        )

    def _persistent(
        self, name: str, info: TensorInfo, role: Role, space: Space = Space.DEVICE
    ) -> Buffer:
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                name=name,
                dtype=info.dtype,
                numel=math.prod(info.shape),
                space=space,
                role=role,
                holds=NamedContent(name=name),
            )
        return self.buffers[name]

    def _gradient(self, parameter: str) -> Destination:
        flat, slot = self._slots[parameter]
        mode = Mode.ACCUMULATE if slot.name in self._parameters_begun else Mode.WRITE
        self._parameters_begun.add(slot.name)
        view = _dense(f"{flat.name}.grad", slot.shape, slot.offset)
        return Destination(view=view, mode=mode, gradient=slot.name)


RANK: Final = "rank"
"""The buffer with the number of each rank, and the name of its value."""

_OUTPUT: Final = {None: "output", Storing.STEP: "stored", Storing.EVALUATION: "evaluation.stored"}
"""The first words of the names of output buffers."""


def output_buffers(joint: CapturedGraph) -> dict[OutputName, str]:
    """Return the names of output buffers: the words of the path, and a number if necessary."""
    names: dict[OutputName, str] = {}
    for output, _ in joint.outputs:
        stem = ".".join((_OUTPUT[output.stored], *re.findall(r"\w+", output.path)))
        taken = set(names.values())
        names[output] = next(
            name
            for number in count()
            if (name := f"{stem}.{number}" if number else stem) not in taken
        )
    return names


def _region(buffer: str, offset: int, numel: int) -> Region:
    return Region(buffer=buffer, offset=offset, numel=numel)


def _dense(buffer: str, shape: tuple[int, ...], offset: int) -> View:
    stride = contiguous_stride(shape)
    region = _region(buffer, offset, span_numel(shape, stride))
    return View(region=region, shape=shape, stride=stride)
