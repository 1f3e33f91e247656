"""A machine's figures from steps that were recorded on all ranks at once, such that a simulated step takes as long.

What is measured is what the simulation asks for. On a CPU the host carries out the stream ``compute`` itself, so what
lies between two of its ops is what issuing takes; ops of other streams have their threads, which take time to wake up,
so that such an op lasts from when it could begin. So does a collective: ranks that come at different times wait for
each other, which is part of what a step takes, and here all ranks stand for one another.

Of the steps the middle half counts, by how long they took. These are averaged, op by op and then over ops that are
alike: segments of one digest; collectives and other ops, from whose sizes alpha and beta are fitted. So the parts add
up to the step in the middle, which they would not do if each were its own median.
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
from zeroir.ir.effects import effects
from zeroir.ir.mesh import COMPUTE, HOST
from zeroir.ir.program import Program, Section
from zeroir.ir.spans import Span
from zeroir.ir.traffic import payloads

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
class _Seen:
    """What an op is for a model of its time, and its seconds, one for each step and rank."""

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
    """The machine ``base`` with what recorded steps of a program say of it, under another name.

    ``workspaces`` are the bytes that segments were seen to take beside their buffers, by digest.
    """
    steps = typical(steps)
    issue_s = _issue_s(program, steps) if base.host.computes else None
    seen = _seen(program, steps, base, issue_s)
    points: dict[_Kind, list[_Seen]] = defaultdict(list)
    for one in seen.values():
        points[one.kind].append(one)
    segments: dict[str, MeasuredSegment] = {}
    collectives: list[MeasuredCollective] = []
    others: list[MeasuredOp] = []
    for kind, found in points.items():
        means = [fmean(one.seconds) for one in found]
        source = f"measured: {len(found)} ops of {len(steps)} steps"
        match kind:
            case _OfSegment(digest):
                segments[digest] = MeasuredSegment(
                    seconds=fmean(means), workspace_bytes=workspaces.get(digest), source=source
                )
            case _OfOp(op, stream):
                alpha_s, beta = fit([one.size_bytes for one in found], means)
                others.append(
                    MeasuredOp(
                        name=op, stream=stream, alpha_s=alpha_s, beta_s_per_byte=beta, source=source
                    )
                )
            case _OfCollective(called, ring):
                alpha_s, beta = fit([one.size_bytes for one in found], means)
                collectives.append(
                    MeasuredCollective(
                        kind=called,
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
            "collectives": (*collectives, *_not_in(base.collectives, collectives)),
            "ops": (*others, *(one for one in base.ops if _key(one) not in map(_key, others))),
        }
    )


def _segments_scale(
    program: Program, base: Machine, measured: Mapping[str, MeasuredSegment]
) -> Figure | None:
    """How many times as long as computed the segments of a program took, each once."""
    plain = base.model_copy(update={"segments": {}, "segments_scale": None})
    computed_s = {one.digest(): segment_cost(one, plain).seconds for one in program.segments}
    whole_s = sum(computed_s[digest] for digest in measured)
    taken_s = sum(one.seconds for one in measured.values())
    if not whole_s or not taken_s:
        return base.segments_scale
    source = f"measured: of {len(measured)} segments, against what is computed for them"
    return Figure(value=taken_s / whole_s, source=source)


def typical(steps: Sequence[Step]) -> Sequence[Step]:
    """The middle half of the steps, by how long they took from the first op to the last."""
    order = sorted(steps, key=_lasted_ns)
    skipped = len(order) // 4
    return order[skipped : len(order) - skipped]


def _lasted_ns(step: Step) -> int:
    spans = [span for rank in step for span in rank]
    return max(span.end_ns for span in spans) - min(span.start_ns for span in spans)


def _not_in(
    old: Sequence[MeasuredCollective], new: Sequence[MeasuredCollective]
) -> Iterator[MeasuredCollective]:
    known = {(one.kind, one.ranks, one.nodes) for one in new}
    return (one for one in old if (one.kind, one.ranks, one.nodes) not in known)


def _key(one: MeasuredOp) -> tuple[str, str]:
    return one.name, one.stream


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta, neither below 0, for which alpha + beta × bytes is nearest, by least squares."""
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
    """The sections of a step in order, each time that they ran, with the span of every op."""
    by_place: dict[_Place, list[Span]] = defaultdict(list)
    for span in spans:
        by_place[span.section, span.index].append(span)
    for found in by_place.values():
        found.sort(key=lambda span: span.start_ns)
    for section in program.sections:
        times = max((len(by_place[section.name, i]) for i in range(len(section.body))), default=0)
        for time in range(times):
            yield (
                section,
                {
                    index: by_place[section.name, index][time]
                    for index in range(len(section.body))
                    if time < len(by_place[section.name, index])
                },
            )


def _is_inline(op: ops.Op) -> bool:
    """Whether the thread that issues ops carries it out."""
    return effects(op).stream in (COMPUTE, HOST)


def _issue_s(program: Program, steps: Sequence[Step]) -> float:
    """What passes between two ops of the issuing thread, for each op that it issues meanwhile."""
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
    total_s = sum(fmean(found) for found in gaps.values())
    return max(total_s / count, 0.0) if count else 0.0


def _seen(
    program: Program, steps: Sequence[Step], base: Machine, issue_s: float | None
) -> Mapping[_Place, _Seen]:
    durations = Durations(program, base)
    rings = {
        comm.name: {
            rank: ring_of(group, base.node_ranks)
            for group in program.mesh.groups(comm.axis)
            for rank in group
        }
        for comm in program.comms
    }
    found: dict[_Place, _Seen] = {}
    for step in steps:
        for rank, spans in enumerate(step):
            for section, index, ready_ns, span in _ready(program, spans, issue_s):
                op, place = section.body[index], (section.name, index)
                one = found.get(place)
                if one is None:
                    one = found[place] = _of(program, op, durations, rings, rank)
                one.seconds.append(max(span.end_ns - ready_ns, 0) / 1e9)
    return found


def _of(
    program: Program,
    op: ops.Op,
    durations: Durations,
    rings: Mapping[str, Mapping[int, Ring]],
    rank: int,
) -> _Seen:
    """What an op is, of which nothing was seen yet."""
    match op:
        case ops.Collective():
            kind: _Kind = _OfCollective(collective_kind(op), rings[op.comm][rank])
            return _Seen(kind=kind, size_bytes=sum(count for _, count in payloads(op, program)))
        case ops.Compute():
            kind = _OfSegment(program.segment_by_name[op.segment].digest())
            return _Seen(kind=kind, size_bytes=0)
        case _:
            kind = _OfOp(ops.op_name(type(op)), effects(op).stream)
            return _Seen(kind=kind, size_bytes=durations.traffic_bytes(op))


def _ready(
    program: Program, spans: Sequence[Span], issue_s: float | None
) -> Iterator[tuple[Section, int, int, Span]]:
    """Every op of a step with its span, and when all that it comes after had ended on its rank.

    Without ``issue_s`` a device's streams run by themselves, and an op is ready when it begins.
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
                # A thread may be at a wait before that is issued, and wakes up for anything else after that is.
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
