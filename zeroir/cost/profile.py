"""The figures of a machine from recorded steps of all ranks, with which a simulated step takes as long as a real one.

The measurements are those that the simulation needs. On a CPU the host itself runs the stream ``compute``, so the gap
between two of its ops is the time to issue the ops between them. Ops of other streams run on their own threads, which
take time to wake up, so the duration of such an op starts when it could have started. The same applies to a collective:
ranks that arrive at different times wait for each other, which is part of a step.

Only the middle half of the steps by duration is used. The durations are averaged op by op, and then over equal ops:
segments of one digest, and collectives and other ops of one kind, from whose sizes alpha and beta are fitted. So the
parts add up to the average step; medians of the parts would not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression
from typing import assert_never

from zeroir.cost.collectives import Ring, ring_of
from zeroir.cost.durations import Durations, collective_kind, segment_cost
from zeroir.cost.machine import (
    CollectiveKind,
    Figure,
    Machine,
    MeasuredCollective,
    MeasuredOp,
    MeasuredSegment,
)
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.mesh import COMPUTE, HOST
from zeroir.ir.program import Program, Section
from zeroir.ir.spans import Span

Step = Sequence[Sequence[Span]]
"""The spans of a step by rank, on one clock."""


@dataclass(frozen=True, slots=True)
class _OfSegment:
    digest: str


@dataclass(frozen=True, slots=True)
class _OfCollective:
    kind: CollectiveKind
    ring: Ring


@dataclass(frozen=True, slots=True)
class _OfOp:
    name: str
    stream: str


_Kind = _OfSegment | _OfCollective | _OfOp
_Place = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class _OpRecord:
    """The recorded durations of one op in seconds, one for each step and rank, its kind and its size."""

    kind: _Kind
    size_bytes: int
    seconds: list[float] = field(default_factory=list)


def measured_machine(
    program: Program,
    steps: Sequence[Step],
    base: Machine,
    *,
    name: str,
    workspaces: Mapping[str, int] = {},
) -> Machine:
    """Return the machine ``base`` with the measurements of recorded steps of a program, and another name.

    ``workspaces`` are the measured workspaces of segments in bytes, by digest.
    """
    steps = typical(steps)
    issue_s = _issue_s(program, steps) if base.host.computes else None
    ops_by_kind: dict[_Kind, list[_OpRecord]] = defaultdict(list)
    for durations in _recorded_durations(program, steps, base, issue_s).values():
        ops_by_kind[durations.kind].append(durations)
    segments: dict[str, MeasuredSegment] = {}
    collectives: list[MeasuredCollective] = []
    other_ops: list[MeasuredOp] = []
    for kind, equal_ops in ops_by_kind.items():
        means = [fmean(durations.seconds) for durations in equal_ops]
        sizes_bytes = [durations.size_bytes for durations in equal_ops]
        source = f"measured: {len(equal_ops)} ops of {len(steps)} steps"
        match kind:
            case _OfSegment(digest):
                segments[digest] = MeasuredSegment(
                    seconds=fmean(means), workspace_bytes=workspaces.get(digest), source=source
                )
            case _OfOp(op, stream):
                alpha_s, beta = fit(sizes_bytes, means)
                other_ops.append(
                    MeasuredOp(
                        name=op, stream=stream, alpha_s=alpha_s, beta_s_per_byte=beta, source=source
                    )
                )
            case _OfCollective(collective, ring):
                alpha_s, beta = fit(sizes_bytes, means)
                collectives.append(
                    MeasuredCollective(
                        kind=collective,
                        ranks=ring.ranks,
                        nodes=ring.nodes,
                        alpha_s=alpha_s,
                        beta_s_per_byte=beta,
                        source=source,
                    )
                )
            case _:
                assert_never(kind)
    host = base.host
    if issue_s is not None:
        source = f"measured: {len(steps)} steps"
        host = host.model_copy(update={"issue_s": Figure(value=issue_s, source=source)})
    return base.model_copy(
        update={
            "name": name,
            "host": host,
            "segments_scale": _segments_scale(program, base, segments),
            "segments": {**base.segments, **segments},
            "collectives": (
                *collectives,
                *(
                    old
                    for old in base.collectives
                    if old.key not in {new.key for new in collectives}
                ),
            ),
            "ops": (
                *other_ops,
                *(old for old in base.ops if old.key not in {new.key for new in other_ops}),
            ),
        }
    )


def _segments_scale(
    program: Program, base: Machine, measured: Mapping[str, MeasuredSegment]
) -> Figure | None:
    """Return the ratio of measured to computed time of the segments of a program, each counted once."""
    plain = base.model_copy(update={"segments": {}, "segments_scale": None})
    computed_s = {
        segment.digest(): segment_cost(segment, plain).seconds for segment in program.segments
    }
    all_computed_s = sum(computed_s[digest] for digest in measured)
    all_measured_s = sum(segment.seconds for segment in measured.values())
    if not all_computed_s or not all_measured_s:
        return base.segments_scale
    source = f"measured: {len(measured)} segments, relative to their computed times"
    return Figure(value=all_measured_s / all_computed_s, source=source)


def typical(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the middle half of the steps, by their durations from the first op to the last."""
    order = sorted(steps, key=_duration_ns)
    skipped = len(order) // 4
    return order[skipped : len(order) - skipped]


def _duration_ns(step: Step) -> int:
    spans = [span for rank in step for span in rank]
    return max(span.end_ns for span in spans) - min(span.start_ns for span in spans)


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares fit of alpha + beta × bytes, with neither below 0."""
    mean_s = max(fmean(seconds), 0.0)
    if len(set(sizes_bytes)) == 1:
        return mean_s, 0.0
    beta, alpha_s = linear_regression(sizes_bytes, seconds)
    if beta < 0:
        return mean_s, 0.0
    if alpha_s < 0:
        return 0.0, max(linear_regression(sizes_bytes, seconds, proportional=True).slope, 0.0)
    return alpha_s, beta


def _runs(program: Program, spans: Sequence[Span]) -> Iterator[tuple[Section, Mapping[int, Span]]]:
    """Yield the sections of a step in order, once for each time that they ran, with the span of every op."""
    by_place: dict[_Place, list[Span]] = defaultdict(list)
    for span in spans:
        by_place[span.section, span.index].append(span)
    for spans_of_op in by_place.values():
        spans_of_op.sort(key=lambda span: span.start_ns)
    for section in program.sections:
        runs = max((len(by_place[section.name, i]) for i in range(len(section.body))), default=0)
        for run in range(runs):
            yield (
                section,
                {
                    index: by_place[section.name, index][run]
                    for index in range(len(section.body))
                    if run < len(by_place[section.name, index])
                },
            )


def _is_inline(op: ops.Op) -> bool:
    """Return whether the thread that issues ops also runs this one."""
    return effects(op).stream in (COMPUTE, HOST)


def _issue_s(program: Program, steps: Sequence[Step]) -> float:
    """Return the gap between two ops of the issuing thread, divided by the number of ops that it issues in the gap."""
    gaps: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for step in steps:
        for spans in step:
            for section, by_index in _runs(program, spans):
                last: int | None = None
                for index, span in by_index.items():
                    if not _is_inline(section.body[index]):
                        continue
                    if last is not None:
                        gap_ns = span.start_ns - by_index[last].end_ns
                        gaps[section.name, last, index].append(gap_ns / 1e9)
                    last = index
    count = sum(index - last for _, last, index in gaps)
    total_s = sum(fmean(gaps_s) for gaps_s in gaps.values())
    return max(total_s / count, 0.0) if count else 0.0


def _recorded_durations(
    program: Program, steps: Sequence[Step], base: Machine, issue_s: float | None
) -> Mapping[_Place, _OpRecord]:
    costs = Durations(program, base)
    rings = {
        comm.name: {
            rank: ring_of(group, base.node_ranks)
            for group in program.mesh.groups(comm.axis)
            for rank in group
        }
        for comm in program.comms
    }
    durations_by_place: dict[_Place, _OpRecord] = {}
    for step in steps:
        for rank, spans in enumerate(step):
            for section, index, ready_ns, span in _ready(program, spans, issue_s):
                op, place = section.body[index], (section.name, index)
                durations = durations_by_place.get(place)
                if durations is None:
                    durations = _no_durations(program, op, costs, rings, rank)
                    durations_by_place[place] = durations
                durations.seconds.append(max(span.end_ns - ready_ns, 0) / 1e9)
    return durations_by_place


def _no_durations(
    program: Program,
    op: ops.Op,
    costs: Durations,
    rings: Mapping[str, Mapping[int, Ring]],
    rank: int,
) -> _OpRecord:
    """Return the record of an op before its first duration."""
    match op:
        case ops.Collective():
            kind: _Kind = _OfCollective(collective_kind(op), rings[op.comm][rank])
            return _OpRecord(kind=kind, size_bytes=payload_bytes(op, program))
        case ops.Compute():
            kind = _OfSegment(program.segment_by_name[op.segment].digest())
            return _OpRecord(kind=kind, size_bytes=0)
        case _:
            kind = _OfOp(ops.op_name(type(op)), effects(op).stream)
            return _OpRecord(kind=kind, size_bytes=costs.traffic_bytes(op))


def _ready(
    program: Program, spans: Sequence[Span], issue_s: float | None
) -> Iterator[tuple[Section, int, int, Span]]:
    """Yield every op of a step with its span, and the time at which its predecessors on its rank had ended.

    Without ``issue_s`` the streams of a device run on their own, and an op is ready when it starts.
    """
    for section, by_index in _runs(program, spans):
        stream_end: dict[str, int] = {}
        comm_end: dict[str, int] = {}
        signalled: dict[str, int] = {}
        issued: tuple[int, int] | None = None
        for index, span in by_index.items():
            op = section.body[index]
            effect = effects(op)
            ready_ns = span.start_ns
            if not _is_inline(op) and issue_s is not None and issued is not None:
                last, end_ns = issued
                issued_ns = end_ns + round((index - last) * issue_s * 1e9)
                before_ns = max(
                    stream_end.get(effect.stream, 0), comm_end.get(effect.comm or "", 0)
                )
                # A thread may arrive at a wait before the wait is issued, and wakes up for any other op afterwards.
                latest = max if isinstance(op, ops.Wait) else min
                ready_ns = latest(ready_ns, max(issued_ns, before_ns))
            if isinstance(op, ops.Wait):
                ready_ns = max(ready_ns, signalled.get(op.waited, ready_ns))
            yield section, index, ready_ns, span
            stream_end[effect.stream] = span.end_ns
            if effect.comm is not None:
                comm_end[effect.comm] = span.end_ns
            signalled.update(dict.fromkeys(effect.signals, span.end_ns))
            if _is_inline(op):
                issued = index, span.end_ns
