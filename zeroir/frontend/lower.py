"""Emit the logical program: one device's training step on flat buffers, without ZeRO."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from zeroir.config import CompileOptions
from zeroir.errors import InternalError, UserError
from zeroir.frontend.capture import CapturedModel
from zeroir.frontend.joint_graph import JointGraph
from zeroir.frontend.micro_step import SegmentCallsBuilder, output_buffer
from zeroir.frontend.module_tensors import TensorInfo
from zeroir.frontend.segment_calls import GradientSink, SegmentCall
from zeroir.frontend.update import EVAL_LOSS, LOSS, scalars, update_body
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import Parameter, layout
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Flat,
    Holding,
    InputBinding,
    OptimizerGroup,
    OutputBinding,
    Program,
    Section,
    Slot,
    State,
)
from zeroir.workspace.segments import declared


def lower(
    captured: CapturedModel,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
    evaluation_calls: Sequence[SegmentCall] = (),
) -> Program:
    """The logical program of the segment calls of a step, and of an evaluation if one was captured, in execution order.

    ``owners`` gives the unit of every parameter that no segment of the step uses.

    Raises:
        UserError: where no parameter is trained.
    """
    flats = _flats(captured, calls, owners, options)
    trainable = tuple(flat for flat in flats if flat.is_trainable)
    if not trainable:
        raise UserError("The model's loss does not depend on any trainable parameter.")
    micro_step = SegmentCallsBuilder(captured, calls, flats, options)
    ops = tuple(micro_step.ops())
    evaluation = captured.evaluation
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
    is_evaluated = evaluation is not None
    scalar_buffers, scalar_bindings = zip(
        *scalars(options, has_evaluation=is_evaluated), strict=True
    )
    sections = [
        Section(name=LAST_MICRO_STEP, body=ops, exit=complete),
        Section(name=UPDATE, entry=complete, body=update_body(trainable, options)),
    ]
    if options.micro_steps > 1:
        sections.insert(0, Section(name=MICRO_STEP, body=ops))
    if evaluation is not None:
        builder = SegmentCallsBuilder(
            captured,
            evaluation_calls,
            flats,
            options,
            evaluation,
            micro_step.buffers,
            micro_step.bindings,
        )
        sections.append(Section(name=EVALUATE, body=tuple(builder.ops())))
    all_calls = (*calls, *evaluation_calls)
    segments = tuple({call.segment.name: call.segment for call in all_calls}.values())
    program = Program(
        mesh=Mesh(axes=(Axis(name="dp", size=1),)),
        flats=flats,
        buffers=(*_state_buffers(flats, options), *scalar_buffers, *micro_step.buffers.values()),
        segments=segments,
        sections=tuple(sections),
        inputs=tuple(
            InputBinding(
                path=info.name, buffer=f"input.{info.name}", dtype=info.dtype, shape=info.shape
            )
            for info in captured.batch
        ),
        outputs=() if evaluation is None else _outputs(evaluation.joint),
        module_buffers=tuple(micro_step.bindings.values()),
        scalars=scalar_bindings,
        groups=(
            OptimizerGroup(
                name="default",
                algorithm=options.optimizer,
                intervals=tuple((flat.name, 0, flat.padded_numel) for flat in trainable),
            ),
        ),
        loss=LOSS,
        eval_loss=EVAL_LOSS if is_evaluated else None,
        options=options.to_pairs(),
        fingerprint=_fingerprint(flats, calls),
    )
    return declared(program)


def _outputs(joint: JointGraph) -> tuple[OutputBinding, ...]:
    bindings: list[OutputBinding] = []
    for path, value in joint.outputs:
        kind = joint.types[value]
        if kind is None:
            raise InternalError(f"the output {path} is undefined")
        bindings.append(
            OutputBinding(path=path, buffer=output_buffer(path), dtype=kind.dtype, shape=kind.shape)
        )
    return tuple(bindings)


def _flats(
    captured: CapturedModel,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
) -> tuple[Flat, ...]:
    """The flats in the order of the units' first forwards; in each, parameters in the order of first use."""
    infos = {info.name: info for info in captured.parameters}
    trained = {
        sink.parameter for call in calls for sink in call.sinks if isinstance(sink, GradientSink)
    }
    unit_of: dict[str, str] = {}
    for call in calls:
        for source in call.sources:
            if source.parameter is not None:
                unit_of.setdefault(source.parameter, call.unit)
    for name in infos:
        unit_of.setdefault(name, owners[name])
    names_of: dict[str, list[str]] = {call.unit: [] for call in calls}
    for name, unit in unit_of.items():
        names_of.setdefault(unit, []).append(name)
    compute = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}[options.precision]
    flats: list[Flat] = []
    for unit, names in names_of.items():
        members: dict[tuple[bool, bool, DType], list[TensorInfo]] = {}
        for name in names:
            info = infos[name]
            key = (name not in trained, info.dtype is not compute, info.dtype)
            members.setdefault(key, []).append(info)
        for (is_frozen, has_other_dtype, dtype), group in sorted(
            members.items(), key=lambda item: item[0]
        ):
            suffix = "fp32" if dtype is DType.F32 else str(dtype)
            name = f"{unit}.frozen" if is_frozen else unit
            name += f".{suffix}" if has_other_dtype else ""
            slots, padded_numel = _slots(group)
            flats.append(
                Flat(
                    name=name,
                    unit=unit,
                    dtype=dtype,
                    is_trainable=not is_frozen,
                    padded_numel=padded_numel,
                    slots=slots,
                )
            )
    return tuple(flats)


def _slots(group: Sequence[TensorInfo]) -> tuple[tuple[Slot, ...], int]:
    parameters = [Parameter(name=i.name, shape=i.shape, aliases=i.aliases) for i in group]
    return layout(parameters, world_size=1)


def _state_buffers(flats: Sequence[Flat], options: CompileOptions) -> list[Buffer]:
    """Parameters, gradients, master weights and optimizer states of one device."""
    buffers: list[Buffer] = []

    def add(flat: Flat, suffix: str, dtype: DType, role: Role, content: FlatContent | None) -> None:
        buffers.append(
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
    return buffers


def _fingerprint(flats: Sequence[Flat], calls: Sequence[SegmentCall]) -> str:
    """SHA-256 of the structure of the model: its flats and the calls of its segments."""
    segments = {call.segment.name: call.segment for call in calls}
    digests = {name: segment.digest() for name, segment in segments.items()}
    structure = [
        (
            call.unit,
            call.call_index,
            digests[call.segment.name],
            [s.parameter for s in call.sources],
        )
        for call in calls
    ]
    return hashlib.sha256(repr((flats, structure)).encode()).hexdigest()
