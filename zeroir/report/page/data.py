"""The data of the page's script: the ops in columns, the lanes of the timeline, the charts and their scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from zeroir.ir.mesh import HOST
from zeroir.report.measured import MeasuredStep
from zeroir.report.page import charts
from zeroir.report.page.sides import Side, aligned_steps

MOST_RANKS: Final = 16
"""The most ranks of a trace on a page; the extremes cover all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A lane of the timeline: a stream of a class of ranks of one side, simulated or measured."""

    side: int
    rank_class: int
    stream: str
    is_measured: bool
    label: str


def page_data(
    shown: Sequence[Side], lanes: Sequence[Lane], measured: MeasuredStep | None
) -> dict[str, object]:
    """Return the data of one program, or of two to compare, as JSON.

    Numbers of ops are consecutive over all sides. Times are microseconds.
    """
    end_us = (
        max(
            (span.end_ns for side in shown for op in side.ops for span in op.spans),
            default=0,
        )
        / 1000
    )
    longest_us = max(end_us, measured.step_ns / 1000 if measured else 0)
    times = charts.time_scale(longest_us)
    top = max(charts.top_bytes(side.curve, side.reported.budget_bytes) for side in shown)
    sizes = charts.memory_scale(top)
    return {
        "ops": _columns(shown),
        "sides": [
            {
                "letter": side.letter,
                "first": sum(len(before.ops) for before in shown[:number]),
                "count": len(side.ops),
                "end": max((span.end_ns for op in side.ops for span in op.spans), default=0) / 1000,
                "at": side.curve.at,
                "roles": list(side.curve.roles.values()),
                "role_names": list(side.curve.roles),
                "boundaries": [at for at, _ in side.curve.boundaries],
                "memory": charts.memory(
                    side.curve,
                    title=side.letter,
                    scale=sizes,
                    top=top,
                    budget_bytes=side.reported.budget_bytes,
                    end_us=longest_us,
                    x_scale=times,
                ),
            }
            for number, side in enumerate(shown)
        ],
        "pairs": _pairs(shown),
        "measured": None if measured is None else _measured(shown[0], measured),
        "lanes": [
            {
                "side": lane.side,
                "class": lane.rank_class,
                "stream": lane.stream,
                "isMeasured": lane.is_measured,
            }
            for lane in lanes
        ],
        "timeline": charts.timeline(
            [lane.label for lane in lanes],
            _groups(lanes),
            marks=max(Counter(lane.stream for lane in lanes).values(), default=0),
            end_us=longest_us,
            scale=times,
        ),
        "time": {"size": times.size, "name": times.name},
        "bytes": {"size": sizes.size, "name": sizes.name},
        "hidden": sorted(charts.HIDDEN_KINDS),
    }


def lanes_of(shown: Sequence[Side], measured: MeasuredStep | None) -> list[Lane]:
    """Return a lane for each stream and class of ranks with an op of some duration; lanes to compare are adjacent.

    With a measured step there are only the lanes of one class and of one rank, which the page selects.
    """
    busy = {
        (number, side, op.stream)
        for side, of_side in enumerate(shown)
        for op in of_side.ops
        for number, span in enumerate(op.spans)
        if span.duration_ns
    }
    measured_streams = {
        shown[0].ops[number].stream
        for spans in (measured.ranks if measured else ())
        for number, span in enumerate(spans)
        if span is not None and span.duration_ns
    }
    streams = dict.fromkeys(
        [HOST, *(stream.name for side in shown for stream in side.reported.program.streams)]
    )
    classes = max(len(side.reported.simulation.classes) for side in shown)
    lanes: list[Lane] = []
    for rank_class in range(1 if measured else classes):
        for stream in streams:
            for number, side in enumerate(shown):
                if (rank_class, number, stream) in busy or stream in measured_streams:
                    label = f"{side.letter} · {stream}" if side.letter else stream
                    if classes > 1 and not measured:
                        first = side.reported.simulation.classes[rank_class].ranks[0]
                        label = f"rank {first} · {label}"
                    lanes.append(
                        Lane(
                            side=number,
                            rank_class=rank_class,
                            stream=stream,
                            is_measured=False,
                            label=label,
                        )
                    )
            if stream in measured_streams:
                lanes.append(
                    Lane(
                        side=0,
                        rank_class=rank_class,
                        stream=stream,
                        is_measured=True,
                        label="measured",
                    )
                )
    return lanes


def _groups(lanes: Sequence[Lane]) -> list[int]:
    """Return the group number of each lane; lanes of the same stream and class are one group."""
    keys = list(dict.fromkeys((lane.rank_class, lane.stream) for lane in lanes))
    return [keys.index((lane.rank_class, lane.stream)) for lane in lanes]


def _columns(shown: Sequence[Side]) -> dict[str, list[object]]:
    step = [op for side in shown for op in side.ops]
    return {
        "side": [number for number, side in enumerate(shown) for _ in side.ops],
        "section": [op.position.section for op in step],
        "line": [op.position.index for op in step],
        "op": [op.op for op in step],
        "kind": [op.kind for op in step],
        "stream": [op.stream for op in step],
        "unit": [", ".join(op.units) for op in step],
        "what": [op.detail for op in step],
        "source": [op.source for op in step],
        "bytes": [op.size_bytes for op in step],
        "flops": [op.flops for op in step],
        "used": [op.used_bytes for op in step],
        "clock": [op.memory_ns / 1000 for op in step],
        "start": [[span.start_ns / 1000 for span in op.spans] for op in step],
        "end": [[span.end_ns / 1000 for span in op.spans] for op in step],
        "critical": [[int(is_critical) for is_critical in op.is_critical] for op in step],
    }


def _pairs(shown: Sequence[Side]) -> list[list[int]] | None:
    """Return for each table row the numbers of its ops in A and in B, -1 for none, and whether they are equal."""
    if len(shown) == 1:
        return None
    old, new = shown
    first = len(old.ops)
    return [
        [
            -1 if row.old is None else row.old,
            -1 if row.new is None else first + row.new,
            int(row.is_equal),
        ]
        for row in aligned_steps(old, new)
    ]


def _measured(side: Side, measured: MeasuredStep) -> dict[str, object]:
    classes = {
        rank: number
        for number, result in enumerate(side.reported.simulation.classes)
        for rank in result.ranks
    }
    durations = [measured.durations_ns(number) for number in range(len(side.ops))]
    return {
        "end": measured.step_ns / 1000,
        "ranks": [
            {
                "class": classes.get(rank, 0),
                "start": _microseconds(None if span is None else span.start_ns for span in spans),
                "end": _microseconds(None if span is None else span.end_ns for span in spans),
            }
            for rank, spans in enumerate(measured.ranks[:MOST_RANKS])
        ],
        "least": _microseconds(min(of_op, default=None) for of_op in durations),
        "most": _microseconds(max(of_op, default=None) for of_op in durations),
    }


def _microseconds(times_ns: Iterable[int | None]) -> list[float | None]:
    return [None if time_ns is None else time_ns / 1000 for time_ns in times_ns]
