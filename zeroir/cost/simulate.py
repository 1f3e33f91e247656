"""How long a step takes on a machine, and what it waits for: a program simulated without running it.

The streams run as the program orders them, on one rank of each class of ranks that behave alike. What is predicted is
as good as the machine's figures; nothing else that uses the machine is known, and neither is the allocator's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from zeroir.cost.classes import RankClass, rank_classes
from zeroir.cost.durations import Durations
from zeroir.cost.events import Timeline, Timing, run
from zeroir.cost.machine import Machine
from zeroir.cost.tasks import Kind, Task, require_micro_steps, step_tasks
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.program import Program
from zeroir.ir.spans import Span

_NS: Final = 1e9
_LONGEST_S: Final = 1e9
"""What an op takes at most, about thirty years; more is a mistake in what was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """What one rank of a class does.

    ``spans`` are in program order; a collective's begins when its rank has come to it, a wait's when its stream has.
    ``busy_s`` is by stream, without waiting for others. ``exposed_s`` is how long the stream ``compute`` does nothing
    while a collective is under way. ``bytes_by_wire`` are sent by a rank, in one direction.
    """

    ranks: tuple[int, ...]
    is_straggler: bool
    spans: tuple[Span, ...]
    busy_s: Mapping[str, float]
    exposed_s: float
    bytes_by_wire: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathItem:
    """One item of the critical path: an op, or the host's issuing it, on a rank of a class."""

    section: str
    index: int
    is_issue: bool
    rank_class: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of how many distinct segments, and of how many distinct collectives, the machine has measurements."""

    segments: int
    of_segments: int
    collectives: int
    of_collectives: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step. ``classes`` are in the order of their first ranks.

    The durations of ``critical_path``, in the order of time, add up to ``step_ns``: an op of it could not begin before
    the one before it had ended. ``flops`` are a rank's, recomputation included. ``hfu`` relates the time that they take
    at the dense peak to the step, and ``mfu`` that of the model's own, without recomputation.
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

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.step_ns / _NS

    @property
    def exposed_s(self) -> float:
        """Exposed communication of the class that has most of it."""
        return max(one.exposed_s for one in self.classes)


def simulate(
    program: Program,
    machine: Machine,
    *,
    logical: Program | None = None,
    straggler: float | None = None,
    micro_steps: int | None = None,
) -> Simulation:
    """Simulate a training step; with ``straggler``, rank 0's own work takes that many times as long.

    ``logical`` is the program before any pass: what is beyond its floating-point operations is recomputation. Without
    it nothing is taken for that.

    Raises:
        UserError: where the machine is too small or endlessly slow, the program is not made for so many micro-steps,
            or the factor is below 1.
    """
    if straggler is not None and not 1 <= straggler < float("inf"):
        raise UserError(f"A straggler takes at least 1 times as long, and not {straggler}.")
    count = require_micro_steps(program, micro_steps)
    classes = rank_classes(
        program.mesh, machine.node_ranks, straggler=None if straggler is None else 0
    )
    issue_ns = _ns(machine.host.issue_s.value)
    tasks = step_tasks(program, count, is_issuing=issue_ns > 0, host_computes=machine.host.computes)
    durations = Durations(program, machine)
    timings = [
        _timings(program, tasks, durations, one, issue_ns, straggler or 1.0) for one in classes
    ]
    lines = run(tasks, classes, timings)
    step_ns = max((end_ns for line in lines for end_ns in line.end_ns), default=0)
    flops, ideal_s = _flops(tasks, durations, machine)
    model_s = ideal_s
    if logical is not None:
        model = step_tasks(logical, count, is_issuing=False, host_computes=False)
        _, model_s = _flops(model, Durations(logical, machine), machine)
    return Simulation(
        machine=machine.name,
        world_size=program.mesh.world_size,
        micro_steps=count,
        straggler=straggler or 1.0,
        step_ns=step_ns,
        classes=tuple(
            _class_result(program, tasks, durations, one, line)
            for one, line in zip(classes, lines, strict=True)
        ),
        critical_path=_critical_path(tasks, lines),
        flops=flops,
        mfu=model_s * _NS / step_ns if step_ns else 0.0,
        hfu=ideal_s * _NS / step_ns if step_ns else 0.0,
        measured=Measured(
            segments=sum(cost.is_measured for cost in durations.segments),
            of_segments=len(durations.segments),
            collectives=sum(cost.is_measured for cost in durations.transfers),
            of_collectives=len(durations.transfers),
        ),
    )


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
    one: RankClass,
    issue_ns: int,
    straggler: float,
) -> list[Timing]:
    slowdown = straggler if one.is_straggler else 1.0
    by_position: dict[tuple[str, int], Timing] = {}
    issue, nothing = Timing(fixed_ns=issue_ns), Timing(fixed_ns=0)
    found: list[Timing] = []
    for task in tasks:
        if task.op is None or task.kind is not Kind.RUN:
            found.append(issue if task.kind is Kind.ISSUE else nothing)
            continue
        # The same op runs in every micro-step.
        position = task.section, task.index
        timing = by_position.get(position)
        if timing is None:
            timing = _timing(program, task.op, durations, one, slowdown)
            by_position[position] = timing
        found.append(timing)
    return found


def _timing(
    program: Program, op: ops.Op, durations: Durations, one: RankClass, slowdown: float
) -> Timing:
    if not isinstance(op, ops.Collective):
        return Timing(fixed_ns=_ns(durations.seconds(op) * slowdown))
    axis = program.comm_by_name[op.comm].axis
    transfer = durations.collective(op, one.rings[axis])
    return Timing(
        fixed_ns=_ns(transfer.latency_s),
        flow_ns=_ns(transfer.transfer_s),
        demands=transfer.demand_by_wire,
        axis=axis,
    )


def _class_result(
    program: Program,
    tasks: Sequence[Task],
    durations: Durations,
    one: RankClass,
    line: Timeline,
) -> ClassResult:
    spans: list[Span] = []
    busy_ns: dict[str, int] = {}
    working: list[tuple[int, int]] = []
    communicating: list[tuple[int, int]] = []
    sent: dict[str, float] = {}
    for number, task in enumerate(tasks):
        op = task.op
        if op is None or task.kind is not Kind.RUN:
            continue
        ready_ns, begun_ns, end_ns = (
            line.ready_ns[number],
            line.begun_ns[number],
            line.end_ns[number],
        )
        start_ns = ready_ns
        if isinstance(op, ops.Wait):
            # It holds its stream from when that has come to it.
            start_ns = 0 if task.stream_before is None else line.end_ns[task.stream_before]
        spans.append(Span(task.section, task.index, start_ns, end_ns))
        duration_ns = end_ns - begun_ns
        busy_ns[task.stream] = busy_ns.get(task.stream, 0) + duration_ns
        if isinstance(op, ops.Collective):
            communicating.append((ready_ns, end_ns))
            ring = one.rings[program.comm_by_name[op.comm].axis]
            for wire, count in durations.collective(op, ring).bytes_by_wire.items():
                sent[wire.value] = sent.get(wire.value, 0.0) + count
        if task.stream == COMPUTE:
            working.append((begun_ns, end_ns))
    return ClassResult(
        ranks=one.ranks,
        is_straggler=one.is_straggler,
        spans=tuple(spans),
        busy_s={
            stream.name: busy_ns[stream.name] / _NS
            for stream in program.streams
            if stream.name in busy_ns
        },
        exposed_s=_outside_ns(communicating, working) / _NS,
        bytes_by_wire=dict(sorted(sent.items())),
    )


def _outside_ns(intervals: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> int:
    """How much of the union of intervals lies outside the union of others."""
    marks = [(at, 0, step) for a, b in intervals for at, step in ((a, 1), (b, -1))]
    marks += [(at, 1, step) for a, b in others for at, step in ((a, 1), (b, -1))]
    open_counts = [0, 0]
    total = last = 0
    for at, which, step in sorted(marks):
        if open_counts[0] and not open_counts[1]:
            total += at - last
        open_counts[which] += step
        last = at
    return total


def _critical_path(tasks: Sequence[Task], lines: Sequence[Timeline]) -> tuple[PathItem, ...]:
    """Back from what ends last, always to what was waited for last; what takes no time is left out."""
    latest = [
        (line.end_ns[number], one, number)
        for one, line in enumerate(lines)
        for number in range(len(tasks))
    ]
    found: list[PathItem] = []
    at = max(latest)[1:] if latest else None
    while at is not None:
        one, number = at
        task, line = tasks[number], lines[one]
        duration_ns = line.end_ns[number] - line.begun_ns[number]
        if duration_ns:
            found.append(
                PathItem(
                    section=task.section,
                    index=task.index,
                    is_issue=task.kind is Kind.ISSUE,
                    rank_class=one,
                    duration_ns=duration_ns,
                )
            )
        at = line.cause[number]
    return tuple(reversed(found))


def _flops(tasks: Sequence[Task], durations: Durations, machine: Machine) -> tuple[int, float]:
    """A rank's floating-point operations of a step, and the seconds that they take at the dense peak."""
    total, ideal_s = 0, 0.0
    for task in tasks:
        if task.kind is not Kind.RUN or not isinstance(task.op, ops.Compute):
            continue
        for dtype, count in durations.segment(task.op.segment).flops.items():
            total += count
            ideal_s += count / machine.compute.peak_flops_per_s(dtype)
    return total, ideal_s
