"""Emit the logical program: one device's training step on flat buffers, with no ZeRO stage in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroir.config import CompileOptions
from zeroir.errors import UserError
from zeroir.frontend.capture import Captured
from zeroir.frontend.joint import InputKind, JointInput
from zeroir.frontend.module_tensors import TensorInfo
from zeroir.frontend.segments import Gradient, Loss, Mutation, SegmentCall, Source, Stored
from zeroir.frontend.update import Scalars, update_body
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
from zeroir.ir.contents import FlatContent, Micro, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import Parameter, layout
from zeroir.ir.mesh import COMPUTE, Axis, Mesh
from zeroir.ir.ops import (
    Alloc,
    Argument,
    Cast,
    Compute,
    Destination,
    Fill,
    Mode,
    Op,
    Release,
)
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Flat,
    Holding,
    InputBinding,
    ModuleBufferBinding,
    OptimizerGroup,
    Program,
    Section,
    Slot,
    State,
)


def lower(
    captured: Captured,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
) -> Program:
    """The logical program of segment calls in execution order.

    ``owners`` gives the unit of every parameter that no segment uses.

    Raises:
        UserError: where nothing is trained.
    """
    flats = _flats(captured, calls, owners, options)
    trainable = tuple(flat for flat in flats if flat.is_trainable)
    if not trainable:
        raise UserError("The model's loss does not depend on any trainable parameter.")
    body = _Body(captured, calls, flats, options)
    ops = tuple(body.ops())
    gradient = "grad_sum" if options.micro_steps > 1 else "grad"
    complete = State(
        holdings=tuple(
            Holding(
                region=Region(buffer=f"{flat.name}.{gradient}", offset=0, numel=flat.padded_numel),
                content=FlatContent(quantity="grad", flat=flat.name, micro=Micro.ALL),
            )
            for flat in trainable
        )
    )
    scalars = Scalars.of(options)
    sections = [
        Section(name=LAST_MICRO_STEP, body=ops, exit=complete),
        Section(name=UPDATE, entry=complete, body=update_body(trainable, options)),
    ]
    if options.micro_steps > 1:
        sections.insert(0, Section(name=MICRO_STEP, body=ops))
    segments = tuple({call.segment.name: call.segment for call in calls}.values())
    return Program(
        mesh=Mesh(axes=(Axis(name="dp", size=1),)),
        flats=flats,
        buffers=(*_state_buffers(flats, options), *scalars.buffers(), *body.buffers.values()),
        segments=segments,
        sections=tuple(sections),
        inputs=tuple(
            InputBinding(
                path=info.name, buffer=f"input.{info.name}", dtype=info.dtype, shape=info.shape
            )
            for info in captured.batch
        ),
        module_buffers=tuple(body.bindings.values()),
        scalars=scalars.bindings(),
        groups=(
            OptimizerGroup(
                name="default",
                algorithm=options.optimizer,
                intervals=tuple((flat.name, 0, flat.padded_numel) for flat in trainable),
            ),
        ),
        loss="loss",
        options=options.to_pairs(),
        fingerprint=_fingerprint(flats, calls),
    )


def _flats(
    captured: Captured,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
) -> tuple[Flat, ...]:
    """The flats in the order of the units' first forwards; in each, parameters in the order of first use."""
    infos = {info.name: info for info in captured.parameters}
    trained = {
        sink.parameter for call in calls for sink in call.sinks if isinstance(sink, Gradient)
    }
    homes: dict[str, str] = {}
    for call in calls:
        for source in call.sources:
            if source.parameter is not None:
                homes.setdefault(source.parameter, call.unit)
    units = list(dict.fromkeys(call.unit for call in calls))
    for name in infos:
        homes.setdefault(name, owners[name])
    units += [unit for unit in dict.fromkeys(homes.values()) if unit not in units]
    compute = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}[options.precision]
    found: list[Flat] = []
    for unit in units:
        members: dict[tuple[bool, bool, DType], list[TensorInfo]] = {}
        for name, home in homes.items():
            if home == unit:
                info = infos[name]
                key = (name not in trained, info.dtype is not compute, info.dtype)
                members.setdefault(key, []).append(info)
        for (is_frozen, is_other, dtype), group in sorted(
            members.items(), key=lambda item: item[0]
        ):
            other = "fp32" if dtype is DType.F32 else str(dtype)
            name = unit + (".frozen" if is_frozen else "") + (f".{other}" if is_other else "")
            slots, padded_numel = _slots(group)
            found.append(
                Flat(
                    name=name,
                    unit=unit,
                    dtype=dtype,
                    is_trainable=not is_frozen,
                    padded_numel=padded_numel,
                    slots=slots,
                )
            )
    return tuple(found)


def _slots(group: Sequence[TensorInfo]) -> tuple[tuple[Slot, ...], int]:
    parameters = [Parameter(name=i.name, shape=i.shape, aliases=i.aliases) for i in group]
    return layout(parameters, world_size=1)


def _state_buffers(flats: Sequence[Flat], options: CompileOptions) -> list[Buffer]:
    """Parameters, gradients, master weights and optimizer states, at rest on one device."""
    found: list[Buffer] = []

    def add(flat: Flat, suffix: str, dtype: DType, role: Role, content: FlatContent | None) -> None:
        found.append(
            Buffer(
                name=f"{flat.name}.{suffix}",
                dtype=dtype,
                numel=flat.padded_numel,
                space=Space.DEVICE,
                role=role,
                holds=content,
            )
        )

    def holds(flat: Flat, quantity: str, micro: Micro | None = None) -> FlatContent:
        return FlatContent(quantity=quantity, flat=flat.name, micro=micro)

    for flat in flats:
        add(flat, "param", flat.dtype, Role.PARAM, holds(flat, "param"))
        if not flat.is_trainable:
            continue
        is_low = flat.dtype.is_low_precision
        if options.micro_steps == 1:
            add(flat, "grad", flat.dtype, Role.GRAD, holds(flat, "grad", Micro.STALE))
        else:
            add(flat, "grad", flat.dtype, Role.GRAD, None)
            add(flat, "grad_sum", DType.F32, Role.GRAD, holds(flat, "grad", Micro.PAST))
        if is_low:
            add(flat, "master", DType.F32, Role.MASTER, holds(flat, "master"))
            if options.micro_steps == 1:
                add(flat, "grad32", DType.F32, Role.STAGING, None)
        for state in options.optimizer.state_names:
            add(flat, state, DType.F32, Role.STATE, holds(flat, state))
    return found


def _fingerprint(flats: Sequence[Flat], calls: Sequence[SegmentCall]) -> str:
    """SHA-256 of what the model is: its flats and the calls of its segments, by structure."""
    structure = [
        (call.unit, call.count, call.segment.digest(), [s.parameter for s in call.sources])
        for call in calls
    ]
    return hashlib.sha256(repr((flats, structure)).encode()).hexdigest()


@dataclass
class _Body:
    """The ops of one micro-step, and the buffers that they need beyond the flats'."""

    captured: Captured
    calls: Sequence[SegmentCall]
    flats: Sequence[Flat]
    options: CompileOptions
    buffers: dict[str, Buffer] = field(default_factory=dict)
    bindings: dict[str, ModuleBufferBinding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._homes = {
            name: (flat, slot)
            for flat in self.flats
            for slot in flat.slots
            for name in (slot.name, *slot.aliases)
        }
        self._inputs = {item.value: item for item in self.captured.joint.inputs}
        self._roots: dict[int, Buffer] = {}
        self._contributed: set[str] = set()
        self._begun: set[str] = set()
        for info in self.captured.batch:
            self._persistent(f"input.{info.name}", info, Role.INPUT)
        if self.captured.sites:
            sites = TensorInfo(name="rng", dtype=DType.I64, shape=(self.captured.sites,))
            self._persistent("rng", sites, Role.RNG, Space.HOST)

    @property
    def is_accumulating(self) -> bool:
        return self.options.micro_steps > 1

    def ops(self) -> list[Op]:
        """Every segment call with the allocs before it and the releases after it."""
        last_use: dict[int, int] = {}
        readers: dict[int, bool] = {}
        last_gradient: dict[str, int] = {}
        for at, call in enumerate(self.calls):
            for source in call.sources:
                last_use[source.root] = at
                readers[source.root] = readers.get(source.root, False) or call.is_backward
            for sink in call.sinks:
                if isinstance(sink, Gradient):
                    last_gradient[self._homes[sink.parameter][0].name] = at
        found: list[Op] = []
        deferred: list[Op] = []
        names = _Names()
        for at, call in enumerate(self.calls):
            arguments = tuple(self._argument(source) for source in call.sources)
            destinations: list[Destination | None] = []
            for index, sink in enumerate(call.sinks):
                kind = call.segment.output_types()[index]
                match sink:
                    case Stored(root=root):
                        is_saved = readers[root] and not call.is_backward
                        buffer = Buffer(
                            name=names.value(call, is_saved=is_saved),
                            dtype=kind.dtype,
                            numel=kind.numel,
                            space=Space.DEVICE,
                            role=Role.SAVED if is_saved else Role.ACTIVATION,
                        )
                        self.buffers[buffer.name] = self._roots[root] = buffer
                        found.append(Alloc(buffer=buffer.name, stream=COMPUTE))
                        view = View(region=whole(buffer), shape=kind.shape, stride=kind.stride)
                        destinations.append(Destination(view=view))
                    case Loss():
                        mode = Mode.ACCUMULATE if self.is_accumulating else Mode.WRITE
                        loss = View(region=_region("loss", 0, 1), shape=(), stride=())
                        destinations.append(Destination(view=loss, mode=mode))
                    case Mutation(buffer=name):
                        target = self._module_buffer(name)
                        is_late = any(
                            self._inputs[source.root].name == name
                            for other in self.calls[at + 1 :]
                            for source in other.sources
                            if source.root in self._inputs
                            and self._inputs[source.root].kind is InputKind.BUFFER
                        )
                        if is_late:
                            # A later segment still reads the old value: the new one waits until the end.
                            waiting = Buffer(
                                name=f"{target.name}.new",
                                dtype=target.dtype,
                                numel=target.numel,
                                space=Space.DEVICE,
                                role=Role.ACTIVATION,
                            )
                            self.buffers[waiting.name] = waiting
                            found.append(Alloc(buffer=waiting.name, stream=COMPUTE))
                            deferred += [
                                Cast(
                                    source=whole(waiting),
                                    destination=whole(target),
                                    stream=COMPUTE,
                                ),
                                Release(buffer=waiting.name, stream=COMPUTE),
                            ]
                            target = waiting
                        shape = kind.shape
                        view = View(
                            region=whole(target), shape=shape, stride=contiguous_stride(shape)
                        )
                        destinations.append(Destination(view=view))
                    case Gradient(parameter=name):
                        found += self._begin(name)
                        destinations.append(self._gradient(name))
            found.append(
                Compute(
                    segment=call.segment.name,
                    arguments=arguments,
                    destinations=tuple(destinations),
                    unit=call.unit,
                    stream=COMPUTE,
                )
            )
            released = [
                self._roots[root].name
                for root in dict.fromkeys(source.root for source in call.sources)
                if root in self._roots and last_use[root] == at
            ]
            found += [Release(buffer=name, stream=COMPUTE) for name in released]
            if self.is_accumulating:
                found += self._finish([flat for flat, end in last_gradient.items() if end == at])
        return found + deferred

    def _argument(self, source: Source) -> Argument:
        kind = source.type
        if source.parameter is not None:
            flat, slot = self._homes[source.parameter]
            return Argument(
                view=_dense(f"{flat.name}.param", slot.shape, slot.offset), parameter=slot.name
            )
        if source.root in self._roots:
            name = self._roots[source.root].name
        else:
            name = self._input_buffer(self._inputs[source.root])
        region = _region(name, source.offset, span_numel(kind.shape, kind.stride))
        return Argument(view=View(region=region, shape=kind.shape, stride=kind.stride))

    def _input_buffer(self, item: JointInput) -> str:
        match item.kind:
            case InputKind.TANGENT:
                return "loss_scale"
            case InputKind.RNG:
                return "rng"
            case InputKind.BATCH:
                return f"input.{item.name}"
            case InputKind.BUFFER:
                return self._module_buffer(item.name).name
            case InputKind.CONSTANT:
                kind = self.captured.joint.types[item.value]
                if kind is None:
                    raise AssertionError("a constant has a type")
                info = TensorInfo(name=item.name, dtype=kind.dtype, shape=kind.shape)
                self._bind(item.name, info, item.data)
                return self._persistent(item.name, info, Role.CONSTANT).name
            case InputKind.PARAMETER:
                raise AssertionError("parameters are bound by name")

    def _module_buffer(self, name: str) -> Buffer:
        info = next(info for info in self.captured.buffers if name in (info.name, *info.aliases))
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
            numel = 1
            for size in info.shape:
                numel *= size
            self.buffers[name] = Buffer(
                name=name,
                dtype=info.dtype,
                numel=numel,
                space=space,
                role=role,
                holds=NamedContent(name=name),
            )
        return self.buffers[name]

    def _begin(self, parameter: str) -> list[Op]:
        """With several micro-steps a flat's gradient begins, all zeros, before its first contribution."""
        flat, _ = self._homes[parameter]
        if not self.is_accumulating or flat.name in self._begun:
            return []
        self._begun.add(flat.name)
        name = f"{flat.name}.grad"
        region = _region(name, 0, flat.padded_numel)
        return [
            Alloc(buffer=name, stream=COMPUTE),
            Fill(destination=region, value=0.0, stream=COMPUTE),
        ]

    def _finish(self, flats: Sequence[str]) -> list[Op]:
        """With several micro-steps a flat's complete gradient is added to the FP32 sum."""
        found: list[Op] = []
        for flat in self.flats:
            if flat.name in flats:
                found += [
                    Cast(
                        source=_region(f"{flat.name}.grad", 0, flat.padded_numel),
                        destination=_region(f"{flat.name}.grad_sum", 0, flat.padded_numel),
                        mode=Mode.ACCUMULATE,
                        stream=COMPUTE,
                    ),
                    Release(buffer=f"{flat.name}.grad", stream=COMPUTE),
                ]
        return found

    def _gradient(self, parameter: str) -> Destination:
        flat, slot = self._homes[parameter]
        mode = Mode.ACCUMULATE if slot.name in self._contributed else Mode.WRITE
        self._contributed.add(slot.name)
        view = _dense(f"{flat.name}.grad", slot.shape, slot.offset)
        return Destination(view=view, mode=mode, gradient=slot.name)


@dataclass
class _Names:
    """Names of temporaries: the unit, ``saved``, ``h`` (forward) or ``d`` (backward), and a number."""

    counts: dict[str, int] = field(default_factory=dict)

    def value(self, call: SegmentCall, *, is_saved: bool) -> str:
        kind = "d" if call.is_backward else "saved" if is_saved else "h"
        stem = f"{call.unit}.{kind}" if not call.count else f"{call.unit}.call{call.count}.{kind}"
        index = self.counts.get(stem, 0)
        self.counts[stem] = index + 1
        return f"{stem}.{index}"


def _region(buffer: str, offset: int, numel: int) -> Region:
    return Region(buffer=buffer, offset=offset, numel=numel)


def _dense(buffer: str, shape: tuple[int, ...], offset: int) -> View:
    stride = contiguous_stride(shape)
    region = _region(buffer, offset, span_numel(shape, stride))
    return View(region=region, shape=shape, stride=stride)
