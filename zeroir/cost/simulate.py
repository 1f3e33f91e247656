"""The simulation of a step on a machine: its time and its critical path, without running the program.

The streams run in the order of the program, on one rank of each class of ranks that behave alike. A prediction is as
good as the machine's figures. It assumes no other load on the machine, and no time for the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zeroir.cost.arithmetic_at_peak import micro_step_at_peak_s
from zeroir.cost.classes import RankClass, rank_classes
from zeroir.cost.durations import Durations
from zeroir.cost.events import Timeline, Timing, run
from zeroir.cost.machine import Machine
from zeroir.cost.tasks import (
    Task,
    TaskKind,
    is_next_step_overlapped,
    require_micro_steps,
    section_tasks,
    step_tasks,
    two_steps_tasks,
)
from zeroir.cost.wires import FlowCost
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.instances import at_largest, instance, largest
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.program import EVALUATE, Program
from zeroir.ir.spans import Span

_NS: Final = 1e9
_LONGEST_S: Final = 1e9
"""The longest duration of an op, about thirty years; a longer one means a mistake in the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """The simulated step of one rank of a class.

    ``spans`` are in program order. The span of a collective starts when its rank arrives at it, and the span of a wait
    when its stream does. ``busy_s`` is the working time by stream, without the time in which it waits for other ranks.
    ``exposed_s`` is the time in which the stream ``compute`` is idle during a collective, and ``exposed_transfers_s``
    the same for transfers and for ops that the host runs. ``bytes_by_wire`` are the bytes that a rank sends, in one
    direction, over each link between ranks, to and from the host, and to and from the disk.
    """

    ranks: tuple[int, ...]
    is_straggler: bool
    spans: tuple[Span, ...]
    busy_s: Mapping[str, float]
    exposed_s: float
    exposed_transfers_s: float
    bytes_by_wire: Mapping[str, float]

    @property
    def label(self) -> str:
        """The first rank, and the number of those like it."""
        alike = len(self.ranks) - 1
        return f"rank {self.ranks[0]}" + (f" and {alike} alike" if alike else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathItem:
    """One item of the critical path, on a rank of a class: an op, or the time in which the host issues it."""

    section: str
    index: int
    is_issue: bool
    rank_class: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The number of distinct segments and collectives with measurements of the machine, and of all of them."""

    segments: int
    of_segments: int
    collectives: int
    of_collectives: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step; where the end of a step overlaps with the next one, a step that follows another.

    ``classes`` are in the order of their first ranks.

    ``critical_path`` is in temporal order, and its durations add up to ``step_ns``: each of its ops started as soon as
    the previous one ended. ``flops`` are those of one rank, including recomputation. ``hfu`` is the time that they take
    at the dense peak, as a fraction of the step; ``mfu`` is the same without recomputation. ``evaluation_s`` are the
    seconds of an evaluation between two steps, None if the program has none or none was simulated. ``redone_s`` are
    those of a step that undoes its speculative update, None if there is none or it was not simulated. ``at`` are the
    values of the program's dims on every rank. ``peak_bytes`` are those of a rank's device, planned for the largest of
    these values; None if they were not computed.
    """

    machine: str
    world_size: int
    micro_steps: int
    straggler: float
    step_ns: int
    classes: tuple[ClassResult, ...]
    critical_path: tuple[PathItem, ...]
    flops: int
    mfu: float
    hfu: float
    measured: Measured
    evaluation_s: float | None = None
    redone_s: float | None = None
    at: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.step_ns / _NS

    @property
    def exposed_s(self) -> float:
        """The seconds of exposed communication of the class with the most."""
        return max(result.exposed_s for result in self.classes)

    @property
    def exposed_transfers_s(self) -> float:
        """The seconds of exposed transfers, and of the host's own ops, of the class with the most."""
        return max(result.exposed_transfers_s for result in self.classes)


def simulate(
    program: Program,
    machine: Machine,
    *,
    logical: Program | None = None,
    straggler: float | None = None,
    micro_steps: int | None = None,
    is_redone: bool = False,
) -> Simulation:
    """Simulate a training step. With ``straggler``, the work of rank 0 takes longer by this factor.

    Dims have their largest values; for others, simulate an instance of the program.

    The guesses of speculative steps are right, unless the step ``is_redone``.

    ``logical`` is the program before any pass: floating-point operations beyond its own are recomputation. Without it
    no operation counts as recomputation.

    Raises:
        UserError: if the machine is too small or extremely slow, the program does not support this number of
            micro-steps, or the factor is below 1.
    """
    at = largest(program)
    program = instance(program, at)
    if straggler is not None and not 1 <= straggler < float("inf"):
        raise UserError(f"A straggler takes at least 1 times as long, and not {straggler}.")
    count = require_micro_steps(program, micro_steps)
    classes = rank_classes(
        program.mesh, machine.node_ranks, straggler=None if straggler is None else 0
    )
    issue_ns = _ns(machine.host.issue_s.value)
    steps = _simulated_steps(program, machine, count)
    tasks = steps.tasks
    durations = Durations(program, machine, is_redone=is_redone)
    timings = [
        _timings(program, tasks, durations, rank_class, issue_ns, straggler or 1.0)
        for rank_class in classes
    ]
    timelines = run(tasks, classes, timings)
    window = steps.window(timelines)
    step_ns = window.end_ns - window.start_ns
    flops, ideal_s = _flops(tasks[steps.first :], durations, machine)
    model_s = ideal_s
    if logical is not None:
        model_s = count * micro_step_at_peak_s(at_largest(logical), machine)
    return Simulation(
        machine=machine.name,
        world_size=program.mesh.world_size,
        micro_steps=count,
        straggler=straggler or 1.0,
        step_ns=step_ns,
        classes=tuple(
            _class_result(program, steps, durations, rank_class, timeline, window)
            for rank_class, timeline in zip(classes, timelines, strict=True)
        ),
        critical_path=_critical_path(steps, timelines, window),
        flops=flops,
        mfu=model_s * _NS / step_ns if step_ns else 0.0,
        hfu=ideal_s * _NS / step_ns if step_ns else 0.0,
        measured=Measured(
            segments=sum(cost.is_measured for cost in durations.segment_costs),
            of_segments=len(durations.segment_costs),
            collectives=sum(cost.is_measured for cost in durations.collective_costs),
            of_collectives=len(durations.collective_costs),
        ),
        at=at,
    )


def simulate_evaluation(program: Program, machine: Machine) -> float | None:
    """Return the seconds of one evaluation, of the largest dims; None if the program has none.

    Raises:
        UserError: as ``simulate``.
    """
    section = program.section_by_name.get(EVALUATE)
    if section is None:
        return None
    program = at_largest(program)
    classes = rank_classes(program.mesh, machine.node_ranks)
    issue_ns = _ns(machine.host.issue_s.value)
    tasks = section_tasks(
        program, [section], is_issuing=issue_ns > 0, host_computes=machine.host.computes
    )
    durations = Durations(program, machine)
    timings = [
        _timings(program, tasks, durations, rank_class, issue_ns, 1.0) for rank_class in classes
    ]
    timelines = run(tasks, classes, timings)
    return max((end_ns for timeline in timelines for end_ns in timeline.end_ns), default=0) / _NS


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTime:
    """The time of the reported step, from the start of the simulation."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulatedSteps:
    """The tasks to simulate, of which the last step's start with the task ``first``.

    ``boundaries`` are the ends of the two steps. They are None for one step, which ends with its last task.
    """

    tasks: Sequence[Task]
    first: int = 0
    boundaries: tuple[int, int] | None = None

    def window(self, timelines: Sequence[Timeline]) -> _StepTime:
        """Return the time of the last step."""
        if self.boundaries is None:
            ends = (end_ns for timeline in timelines for end_ns in timeline.end_ns)
            return _StepTime(start_ns=0, end_ns=max(ends, default=0))
        start, end = self.boundaries
        return _StepTime(
            start_ns=max(timeline.end_ns[start] for timeline in timelines),
            end_ns=max(timeline.end_ns[end] for timeline in timelines),
        )


def _simulated_steps(program: Program, machine: Machine, micro_steps: int) -> _SimulatedSteps:
    """Return the tasks of one step, or of two where the end of a step overlaps with the next one."""
    is_issuing, host_computes = _ns(machine.host.issue_s.value) > 0, machine.host.computes
    if not is_next_step_overlapped(program):
        tasks = step_tasks(program, micro_steps, is_issuing=is_issuing, host_computes=host_computes)
        return _SimulatedSteps(tasks=tasks)
    tasks, boundaries = two_steps_tasks(
        program, micro_steps, is_issuing=is_issuing, host_computes=host_computes
    )
    return _SimulatedSteps(tasks=tasks, first=boundaries[0] + 1, boundaries=boundaries)


def _ns(seconds: float) -> int:
    if not seconds < _LONGEST_S:
        raise UserError(
            f"An op would take {seconds:.0e} seconds: check the machine's rates, and how slow the straggler is."
        )
    return round(seconds * _NS)


def _timings(
    program: Program,
    tasks: Sequence[Task],
    durations: Durations,
    rank_class: RankClass,
    issue_ns: int,
    straggler: float,
) -> list[Timing]:
    slowdown = straggler if rank_class.is_straggler else 1.0
    timing_by_place: dict[tuple[str, int], Timing] = {}
    issue, nothing = Timing(fixed_ns=issue_ns), Timing(fixed_ns=0)
    timings: list[Timing] = []
    for task in tasks:
        if task.op is None or task.kind is not TaskKind.RUN:
            timings.append(issue if task.kind is TaskKind.ISSUE else nothing)
            continue
        # A section runs once for each micro-step, with the same timings.
        place = task.section, task.index
        timing = timing_by_place.get(place)
        if timing is None:
            timing = _timing(program, task.op, durations, rank_class, slowdown)
            timing_by_place[place] = timing
        timings.append(timing)
    return timings


def _timing(
    program: Program, op: ops.Op, durations: Durations, rank_class: RankClass, slowdown: float
) -> Timing:
    if isinstance(op, ops.Collective):
        axis = program.comm_by_name[op.comm].axis
        cost: FlowCost | None = durations.collective(op, rank_class.rings[axis])
        slowdown = 1.0
    else:
        axis, cost = None, durations.flow(op)
    if cost is None:
        return Timing(fixed_ns=_ns(durations.seconds(op) * slowdown))
    return Timing(
        fixed_ns=_ns(cost.latency_s * slowdown),
        flow_ns=_ns(cost.transfer_s * slowdown),
        demands=cost.demand_by_wire,
        axis=axis,
    )


def _class_result(
    program: Program,
    steps: _SimulatedSteps,
    durations: Durations,
    rank_class: RankClass,
    timeline: Timeline,
    window: _StepTime,
) -> ClassResult:
    spans: list[Span] = []
    busy_ns: dict[str, int] = {}
    working: list[tuple[int, int]] = []
    communicating: list[tuple[int, int]] = []
    transferring: list[tuple[int, int]] = []
    sent: dict[str, float] = {}
    for number, task in enumerate(steps.tasks):
        op = task.op
        if op is None or task.kind is not TaskKind.RUN:
            continue
        ready_ns, begun_ns, end_ns = (
            timeline.ready_ns[number],
            timeline.begun_ns[number],
            timeline.end_ns[number],
        )
        start_ns = ready_ns
        if isinstance(op, ops.Wait):
            # A wait occupies its stream from the time at which the stream arrives at it.
            start_ns = 0 if task.stream_before is None else timeline.end_ns[task.stream_before]
        if number >= steps.first:
            start_ns = max(start_ns, window.start_ns) - window.start_ns
            spans.append(Span(task.section, task.index, start_ns, end_ns - window.start_ns))
            busy_ns[task.stream] = busy_ns.get(task.stream, 0) + end_ns - begun_ns
        if isinstance(op, ops.Collective):
            communicating.append((ready_ns, end_ns))
            ring = rank_class.rings[program.comm_by_name[op.comm].axis]
            flow: FlowCost | None = durations.collective(op, ring)
        else:
            flow = durations.flow(op)
            if flow is not None:
                transferring.append((begun_ns, end_ns))
        if flow is not None and number >= steps.first:
            for wire, count in flow.bytes_by_wire.items():
                sent[wire.value] = sent.get(wire.value, 0.0) + count
        if task.stream == COMPUTE:
            working.append((begun_ns, end_ns))
    return ClassResult(
        ranks=rank_class.ranks,
        is_straggler=rank_class.is_straggler,
        spans=tuple(spans),
        busy_s={
            stream.name: busy_ns[stream.name] / _NS
            for stream in program.streams
            if stream.name in busy_ns
        },
        exposed_s=_outside_ns(communicating, working, window) / _NS,
        exposed_transfers_s=_outside_ns(transferring, working, window) / _NS,
        bytes_by_wire=dict(sorted(sent.items())),
    )


def _outside_ns(
    intervals: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]], window: _StepTime
) -> int:
    """Return the length of the first union of intervals within a window, minus its intersection with the second."""
    marks: list[tuple[int, int, int]] = []
    for which, pairs in enumerate((intervals, others)):
        for begun_ns, ended_ns in pairs:
            start_ns, end_ns = max(begun_ns, window.start_ns), min(ended_ns, window.end_ns)
            if start_ns < end_ns:
                marks += ((start_ns, which, 1), (end_ns, which, -1))
    open_counts = [0, 0]
    total = last = 0
    for at, which, step in sorted(marks):
        if open_counts[0] and not open_counts[1]:
            total += at - last
        open_counts[which] += step
        last = at
    return total


def _critical_path(
    steps: _SimulatedSteps, timelines: Sequence[Timeline], window: _StepTime
) -> tuple[PathItem, ...]:
    """Return the chain of causes, within the step, that ends with its end; tasks without a duration are omitted."""
    tasks = steps.tasks
    ends = range(len(tasks)) if steps.boundaries is None else steps.boundaries[1:]
    latest = [
        (timeline.end_ns[number], rank_class, number)
        for rank_class, timeline in enumerate(timelines)
        for number in ends
    ]
    backwards: list[PathItem] = []
    cause = max(latest)[1:] if latest else None
    while cause is not None:
        rank_class, number = cause
        task, timeline = tasks[number], timelines[rank_class]
        duration_ns = timeline.end_ns[number] - max(timeline.begun_ns[number], window.start_ns)
        if duration_ns < 0:
            break
        if duration_ns:
            backwards.append(
                PathItem(
                    section=task.section,
                    index=task.index,
                    is_issue=task.kind is TaskKind.ISSUE,
                    rank_class=rank_class,
                    duration_ns=duration_ns,
                )
            )
        cause = timeline.cause[number]
    return tuple(reversed(backwards))


def _flops(tasks: Sequence[Task], durations: Durations, machine: Machine) -> tuple[int, float]:
    """Return the floating-point operations of a rank in a step, and the seconds that they take at the dense peak."""
    total, ideal_s = 0, 0.0
    for task in tasks:
        if task.kind is not TaskKind.RUN or not isinstance(task.op, ops.Compute):
            continue
        for dtype, count in durations.segment(task.op.segment).flops.items():
            total += count
            ideal_s += count / machine.compute.peak_flops_per_s(dtype)
    return total, ideal_s
