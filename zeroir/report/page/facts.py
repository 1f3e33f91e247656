"""The data of a report's page: the ops of a step with their times, its memory, and its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from zeroir.cost.simulate import ClassResult, Simulation
from zeroir.cost.tasks import step_sections
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.labels import labels
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import op_name
from zeroir.ir.program import EVALUATE, OpPosition, Program
from zeroir.ir.spans import Span
from zeroir.memory.curve import live_bytes
from zeroir.report.names import shortened
from zeroir.report.origins import op_source
from zeroir.report.page.phases import ComputePhase, phases
from zeroir.report.schedule import buffer_owners


class ShownKind(StrEnum):
    """The category of an op for the reader. Each kind has a colour, and can be hidden on the page."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"
    GATHER = "gather"
    REDUCE = "reduce"
    UPDATE = "update"
    TRANSFER = "transfer"
    ELEMENTWISE = "cast, fill, scale"
    MEMORY = "alloc, free"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOp:
    """One op of a step: its place, its units, its size and its times.

    ``kind`` determines its colour on the page. ``size_bytes`` are the bytes that it moves, allocates or frees.
    ``spans`` has its time on each class of ranks, and ``is_critical`` whether it is on the critical path there.
    ``used_bytes`` are those of the buffers on the device after the op, plus the workspace for a segment. ``memory_ns``
    is the time at which the memory chart shows it; see ``memory_times_ns``.
    """

    position: OpPosition
    op: str
    kind: ShownKind
    stream: str
    units: tuple[str, ...]
    detail: str
    source: str
    size_bytes: int
    flops: int
    spans: tuple[Span, ...]
    is_critical: tuple[bool, ...]
    used_bytes: int
    memory_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes on one rank's device over a step, at the ops where they change.

    ``roles[r][i]`` are live from op number ``at[i]`` until op number ``at[i + 1]``; the role ``workspace`` includes the
    workspaces of segments while they run. ``boundaries`` are the numbers of the first ops of sections, with their
    names.
    """

    at: Sequence[int]
    roles: Mapping[str, Sequence[int]]
    boundaries: Sequence[tuple[int, str]]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of all roles together."""
        return max((sum(column) for column in zip(*self.roles.values(), strict=True)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """A unit: its parameters, and for one step on one rank its FLOPs and the bytes that its collectives handle."""

    name: str
    parameters_numel: int
    flops: int
    gathered_bytes: int
    reduced_bytes: int


def step_ops(program: Program, simulation: Simulation) -> list[StepOp]:
    """Return every op of a step in program order, with as many micro-steps as were simulated."""
    names, owners = labels(program), buffer_owners(program)
    critical = {
        (OpPosition(item.section, item.index), item.rank_class)
        for item in simulation.critical_path
        if not item.is_issue
    }
    spans_by_class = [_spans_by_position(rank_class) for rank_class in simulation.classes]
    curves = {
        section.name: live_bytes(program, section).totals
        for section in program.sections
        if section.name != EVALUATE
    }
    phases_by_section = {section.name: phases(program, section) for section in program.sections}
    runs: Counter[OpPosition] = Counter()
    shown_ops: list[StepOp] = []
    sections = step_sections(program, simulation.micro_steps)
    times_ns = memory_times_ns(
        [op for section in sections for op in section.body],
        simulation.classes[0].spans,
    )
    for section in sections:
        for position, op in section.positioned_ops():
            shown_ops.append(
                StepOp(
                    position=position,
                    op=op_name(type(op)),
                    kind=op_kind(op, phases_by_section[section.name].get(position.index)),
                    stream=effects(op).stream,
                    units=_units(op, owners),
                    detail=names[position].partition(" ")[2].partition(" ")[2],
                    source=op_source(program, op),
                    size_bytes=_size_bytes(program, op),
                    flops=_flops(program, op),
                    spans=tuple(spans[position][runs[position]] for spans in spans_by_class),
                    is_critical=tuple(
                        (position, number) in critical for number in range(len(spans_by_class))
                    ),
                    used_bytes=curves[section.name][position.index + 1],
                    memory_ns=times_ns[len(shown_ops)],
                )
            )
            runs[position] += 1
    return shown_ops


def memory_times_ns(body: Sequence[ops.Op], spans: Sequence[Span]) -> list[int]:
    """Return the time of each op on the memory chart's axis, in nanoseconds, in ascending order.

    The memory of a step, and so its peak, is defined in program order, which streams may overtake. An op of the stream
    ``compute`` is shown at its start. Any other op is shown at its own start, unless this is outside the interval of
    its neighbours on ``compute``: then it is shown at the nearer one of those.
    """
    starts_ns = [span.start_ns for span in spans]
    latest_ns = [0] * len(body)
    bound_ns = max((span.end_ns for span in spans), default=0)
    for number in reversed(range(len(body))):
        if effects(body[number]).stream == COMPUTE:
            bound_ns = min(bound_ns, starts_ns[number])
        latest_ns[number] = bound_ns
    times_ns: list[int] = []
    now_ns = 0
    for start_ns, bound_ns in zip(starts_ns, latest_ns, strict=True):
        now_ns = max(now_ns, min(start_ns, bound_ns))
        times_ns.append(now_ns)
    return times_ns


def memory_curve(program: Program, micro_steps: int | None = None) -> MemoryCurve:
    """Return the memory of a step in program order; by default with the micro-steps that it was compiled for."""
    at: list[int] = []
    columns: list[Counter[str]] = []
    boundaries: list[tuple[int, str]] = []
    number = 0
    for section in step_sections(program, micro_steps):
        boundaries.append((number, section.name))
        curve = live_bytes(program, section)
        for index in range(len(section.body)):
            column = Counter({role.value: curve.roles[role][index + 1] for role in curve.roles})
            column[Role.WORKSPACE.value] += curve.workspace[index + 1]
            if not columns or column != columns[-1]:
                at.append(number)
                columns.append(column)
            number += 1
    if columns:
        at.append(number)
        columns.append(columns[-1])
    used = [role.value for role in Role if any(column[role.value] for column in columns)]
    return MemoryCurve(
        at=at,
        roles={role: [column[role] for column in columns] for role in used},
        boundaries=boundaries,
    )


def unit_facts(program: Program, shown_ops: Sequence[StepOp]) -> list[UnitFacts]:
    """Return the units in the order of their first use."""
    numels: Counter[str] = Counter()
    for flat in program.flats:
        numels[flat.unit] += flat.numel
    flops: Counter[str] = Counter()
    moved: dict[ShownKind, Counter[str]] = {
        ShownKind.GATHER: Counter(),
        ShownKind.REDUCE: Counter(),
    }
    for op in shown_ops:
        for unit in op.units:
            flops[unit] += op.flops
            if op.kind in moved:
                moved[op.kind][unit] += op.size_bytes
    return [
        UnitFacts(
            name=name,
            parameters_numel=numel,
            flops=flops[name],
            gathered_bytes=moved[ShownKind.GATHER][name],
            reduced_bytes=moved[ShownKind.REDUCE][name],
        )
        for name, numel in numels.items()
    ]


def op_kind(op: ops.Op, phase: ComputePhase | None) -> ShownKind:
    """Return the kind of an op; ``phase`` is that of a compute, None for one of the update."""
    match op:
        case ops.Compute():
            return ShownKind.UPDATE if phase is None else ShownKind(phase.value)
        case ops.Gather() | ops.Broadcast():
            return ShownKind.GATHER
        case ops.ReduceScatter() | ops.AllReduce():
            return ShownKind.REDUCE
        case ops.Update():
            return ShownKind.UPDATE
        case ops.Transfer():
            return ShownKind.TRANSFER
        case ops.Elementwise():
            return ShownKind.ELEMENTWISE
        case ops.Memory():
            return ShownKind.MEMORY
        case ops.Wait():
            return ShownKind.WAIT
        case _:
            assert_never(op)


def _spans_by_position(rank_class: ClassResult) -> dict[OpPosition, list[Span]]:
    spans: dict[OpPosition, list[Span]] = {}
    for span in rank_class.spans:
        spans.setdefault(span.position, []).append(span)
    return spans


def _units(op: ops.Op, owners: Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(op, ops.Compute):
        return (op.unit,)
    effect = effects(op)
    regions = (*effect.reads, *effect.writes, *effect.accumulates)
    names = (*effect.allocs, *effect.frees, *(region.buffer for region in regions))
    return tuple(shortened(list(dict.fromkeys(owners[name] for name in names if name in owners))))


def _size_bytes(program: Program, op: ops.Op) -> int:
    buffers = program.buffer_by_name
    match op:
        case ops.Collective():
            return payload_bytes(op, program)
        case ops.Memory():
            return buffers[op.buffer].size_bytes
        case ops.Transfer():
            itemsize_bytes = buffers[op.source.buffer].dtype.itemsize_bytes
            return op.source.local_numel(program.mesh) * itemsize_bytes
        case _:
            return 0


def _flops(program: Program, op: ops.Op) -> int:
    return program.segment_by_name[op.segment].flops if isinstance(op, ops.Compute) else 0
