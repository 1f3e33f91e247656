"""Emits the logical program: one device's training step of one micro-step on flat buffers, without ZeRO."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from zeroir.config import CompileOptions
from zeroir.errors import InternalError, UserError
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.frontend.capture.captured_model import CapturedModel
from zeroir.frontend.capture.module_tensors import TensorInfo
from zeroir.frontend.lowering.micro_step import RANK, SegmentCallsBuilder, output_buffers
from zeroir.frontend.lowering.parameter_groups import (
    KeptStates,
    declared_groups,
    kept_states,
    parameter_groups,
    states_of,
)
from zeroir.frontend.lowering.segment_calls import GradientSink, SegmentCall
from zeroir.frontend.lowering.update import reports, scalars, update_body
from zeroir.frontend.source.source import NOTHING_EARLIER, Earlier
from zeroir.frontend.source.source_lines import refusals_at
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import DIRECTION, EMA, FlatContent, Micro
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import Parameter, layout
from zeroir.ir.mesh import DATA_AXIS, VALUES_COMM, Axis, Communicator, Mesh
from zeroir.ir.own_coordinates import own_numel
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    PARAMETER_ALIGNMENT_NUMEL,
    UPDATE,
    Flat,
    Holding,
    InputBinding,
    OutputBinding,
    Program,
    Section,
    State,
)
from zeroir.ir.sizes import Dim, Size
from zeroir.torch_ops.purity import declarations


def lower(
    captured: CapturedModel,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
    evaluation_calls: Sequence[SegmentCall] = (),
    earlier: Earlier = NOTHING_EARLIER,
) -> Program:
    """Return the logical program of a step's segment calls, and of those of an evaluation, in execution order.

    ``owners`` has the unit of every parameter that no segment of the step uses.

    Raises:
        UserError: if no parameter is trained.
    """
    trained = {
        sink.parameter for call in calls for sink in call.sinks if isinstance(sink, GradientSink)
    }
    groups = parameter_groups(
        (_parameter(info) for info in captured.parameters if info.name in trained),
        options,
        frozen=(_parameter(info) for info in captured.parameters if info.name not in trained),
    )
    states_by_name = kept_states(groups, earlier.step_counts)
    flats = _flats(captured, calls, owners, options, states_by_name, earlier.flats)
    trainable = tuple(flat for flat in flats if flat.is_trainable)
    if not trainable:
        with refusals_at(captured.joint.place):
            raise UserError("The model's loss does not depend on any trainable parameter.")
    micro_step = SegmentCallsBuilder(captured, calls, flats)
    ops = tuple(micro_step.ops())
    evaluation = captured.evaluation
    complete = State(
        holdings=tuple(
            Holding(
                region=Region(buffer=f"{flat.name}.grad", offset=0, numel=flat.padded_numel),
                content=FlatContent(quantity="grad", flat=flat.name, micro=Micro.ALL),
            )
            for flat in trainable
        )
    )
    is_evaluated = evaluation is not None
    scalar_buffers, scalar_bindings = zip(
        *scalars(options, groups, states_by_name, has_evaluation=is_evaluated), strict=True
    )
    sections = [
        Section(name=LAST_MICRO_STEP, body=ops, exit=complete),
        Section(
            name=UPDATE,
            entry=complete,
            body=update_body(trainable, options, groups, states_by_name),
        ),
    ]
    if evaluation is not None:
        builder = SegmentCallsBuilder(
            captured,
            evaluation_calls,
            flats,
            evaluation,
            micro_step.buffers,
            micro_step.bindings,
        )
        sections.append(Section(name=EVALUATE, body=tuple(builder.ops())))
    all_calls = (*calls, *evaluation_calls)
    segments = tuple(
        {call.segment.name: call.segment for call in all_calls if not call.is_exchange}.values()
    )
    return Program(
        mesh=Mesh(axes=(Axis(name=DATA_AXIS, size=1),)),
        comms=_comms(captured),
        flats=flats,
        dims=_dims(captured),
        buffers=(
            *_state_buffers(flats, options, states_by_name),
            *scalar_buffers,
            *micro_step.buffers.values(),
        ),
        operators=declarations(node.op for segment in segments for node in segment.nodes),
        segments=segments,
        sections=tuple(sections),
        inputs=tuple(
            InputBinding(
                path=info.name, buffer=f"input.{info.name}", dtype=info.dtype, shape=info.shape
            )
            for info in captured.batch
        ),
        outputs=(
            *_outputs(captured.joint),
            *(() if evaluation is None else _outputs(evaluation.joint)),
        ),
        batch_constants=captured.constants,
        module_buffers=tuple(micro_step.bindings.values()),
        scalars=scalar_bindings,
        groups=declared_groups(groups, trainable),
        reports=reports(options, has_evaluation=is_evaluated),
        rank=RANK if RANK in micro_step.buffers else None,
        options=options,
        fingerprint=_fingerprint(flats, calls),
    )


def _comms(captured: CapturedModel) -> tuple[Communicator, ...]:
    """Return the communicator of all ranks, where the model depends on their number."""
    if captured.ranks is None:
        return ()
    return (Communicator(name=VALUES_COMM, axis=DATA_AXIS, ranks=captured.ranks),)


def _dims(captured: CapturedModel) -> tuple[Dim, ...]:
    """Return the dims of the batch, by name."""
    sizes = [size for info in captured.batch for size in info.shape if isinstance(size, Size)]
    dims = {dim for size in sizes for dim in size.dims}
    return tuple(sorted(dims, key=lambda dim: dim.name))


def _outputs(joint: CapturedGraph) -> tuple[OutputBinding, ...]:
    bindings: list[OutputBinding] = []
    buffers = output_buffers(joint)
    for output, value in joint.outputs:
        kind = joint.types[value]
        if kind is None:
            raise InternalError(f"the output {output.path} is undefined")
        bindings.append(
            OutputBinding(
                path=output.path,
                buffer=buffers[output],
                dtype=kind.dtype,
                shape=kind.shape,
                stored=output.stored,
            )
        )
    return tuple(bindings)


def _flats(
    captured: CapturedModel,
    calls: Sequence[SegmentCall],
    owners: Mapping[str, str],
    options: CompileOptions,
    states_by_name: Mapping[str, KeptStates],
    earlier: Sequence[Flat],
) -> tuple[Flat, ...]:
    """Return the flats in the order of the units' first forwards, each with parameters in the order of first use.

    ``states_by_name`` has the optimizer states of each trained parameter. Parameters with different states are in
    different flats. Parameters of ``earlier`` flats have the order and the units that they have there.
    """
    infos = {info.name: info for info in captured.parameters}
    unit_of = {
        slot.name: flat.unit for flat in earlier for slot in flat.slots if slot.name in infos
    }
    for call in calls:
        for source in call.sources:
            if source.parameter is not None:
                unit_of.setdefault(source.parameter, call.unit)
    for name in infos:
        unit_of.setdefault(name, owners[name])
    names_of: dict[str, list[str]] = {flat.unit: [] for flat in earlier}
    names_of |= {call.unit: [] for call in calls if call.unit not in names_of}
    for name, unit in unit_of.items():
        names_of.setdefault(unit, []).append(name)
    compute = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}[options.precision.dtype]
    usual = states_of(options.optimizer)
    flats: list[Flat] = []
    for unit, names in names_of.items():
        members: dict[tuple[bool, bool, DType, bool, KeptStates], list[TensorInfo]] = {}
        for name in names:
            info = infos[name]
            states = states_by_name.get(name, usual)
            key = (
                name not in states_by_name,
                info.dtype is not compute,
                info.dtype,
                states != usual,
                states,
            )
            members.setdefault(key, []).append(info)
        for (is_frozen, has_other_dtype, dtype, _, states), group in sorted(
            members.items(), key=lambda item: item[0]
        ):
            suffix = "fp32" if dtype is DType.F32 else str(dtype)
            name = f"{unit}.frozen" if is_frozen else unit
            name += f".{suffix}" if has_other_dtype else ""
            name += _states_suffix(states, usual)
            slots, padded_numel = layout(
                [_parameter(info) for info in group],
                world_size=1,
                alignment_numel=max(states.form.block_numel, PARAMETER_ALIGNMENT_NUMEL),
            )
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


def _states_suffix(states: KeptStates, usual: KeptStates) -> str:
    """Return the suffix of a flat's name for its states, where they are not the usual ones."""
    suffix = f".{states.algorithm}" if states.algorithm is not usual.algorithm else ""
    if states.form != usual.form and states.algorithm.has_states_of_elements:
        suffix += f".{states.form.bits}bit"
    return f"{suffix}.steps{states.count}" if states.count else suffix


def _parameter(info: TensorInfo) -> Parameter:
    return Parameter(name=info.name, shape=info.shape, aliases=info.aliases)


def _state_buffers(
    flats: Sequence[Flat], options: CompileOptions, states_by_name: Mapping[str, KeptStates]
) -> list[Buffer]:
    """Return buffers of parameters, gradients, master weights, optimizer states and averages of one device."""
    buffers: list[Buffer] = []

    def add(
        flat: Flat,
        suffix: str,
        dtype: DType,
        role: Role,
        content: FlatContent | None,
        numel: int | None = None,
    ) -> None:
        buffers.append(
            Buffer(
                name=f"{flat.name}.{suffix}",
                dtype=dtype,
                numel=flat.padded_numel if numel is None else numel,
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
        add(flat, "grad", flat.dtype, Role.GRAD, holds(flat, "grad", Micro.STALE))
        if is_low:
            add(flat, "master", DType.F32, Role.MASTER, holds(flat, "master"))
            add(flat, "grad32", DType.F32, Role.STAGING, None)
        states = states_by_name[flat.slots[0].name]
        algorithm = states.algorithm
        for state in algorithm.state_names:
            for numbers in states.form.numbers(state):
                content, numel = holds(flat, numbers.quantity), numbers.numel(flat.padded_numel)
                add(flat, numbers.quantity, numbers.dtype, Role.STATE, content, numel)
        own_state = algorithm.declaration.own_state
        if own_state is not None:
            own = own_state.quantity
            add(flat, own, DType.F32, Role.STATE, holds(flat, own), own_numel(own, flat))
        if algorithm.direction_dtype is not None:
            add(flat, DIRECTION, algorithm.direction_dtype, Role.STAGING, None)
        if options.ema is not None:
            add(flat, EMA, DType.F32, Role.STATE, holds(flat, EMA))
    return buffers


def _fingerprint(flats: Sequence[Flat], calls: Sequence[SegmentCall]) -> str:
    """Return the SHA-256 of the structure of the model: its flats and the calls of its segments."""
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
