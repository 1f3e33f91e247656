"""A recorded or simulated step in the format that Perfetto and Chrome's tracing page read.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes it: a process per rank, a
thread per stream, a complete event (``X``) per op, and an arrow (``s`` to ``f``) from what signals an event to what
waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zeroir.cost.simulate import Simulation
from zeroir.ir import ops
from zeroir.ir.effects import effects
from zeroir.ir.labels import labels
from zeroir.ir.mesh import HOST
from zeroir.ir.program import OpPosition, Program
from zeroir.ir.spans import Span
from zeroir.ir.traffic import payloads
from zeroir.report.names import format_bytes

Event = Mapping[str, object]


def simulated_trace(program: Program, simulation: Simulation) -> dict[str, object]:
    """The trace of a simulated step: a process for each class of ranks that behave alike, named after its first."""
    classes = simulation.classes
    names = [
        f"rank {one.ranks[0]}" + (f" and {len(one.ranks) - 1} alike" if one.ranks[1:] else "")
        for one in classes
    ]
    trace = chrome_trace(program, [one.spans for one in classes], step=1, names=names)
    trace["otherData"] = {
        "machine": simulation.machine,
        "ranks": simulation.world_size,
        "fingerprint": program.fingerprint,
    }
    return trace


def chrome_trace(
    program: Program,
    ranks: Sequence[Sequence[Span]],
    *,
    step: int,
    names: Sequence[str] | None = None,
) -> dict[str, object]:
    """The trace of one step as a JSON document; ``ranks`` are every rank's spans on one clock.

    ``names`` are what the processes are called, where they are not simply the ranks.
    """
    ops_labels = labels(program)
    called = [f"rank {rank}" for rank in range(len(ranks))] if names is None else names
    events: list[Event] = []
    for rank, spans in enumerate(ranks):
        events += _headings(program, rank, called[rank])
        events += _events(program, ops_labels, rank, spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "ranks": len(ranks), "fingerprint": program.fingerprint},
    }


def _headings(program: Program, rank: int, called: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": called}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, thread in _threads(program).items():
        place = {"pid": rank, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}


def _threads(program: Program) -> dict[str, int]:
    """A number for every stream that the program uses, in the order of declaration; the host comes first."""
    used = {effects(op).stream for op in program.ops()}
    names = [HOST, *(stream.name for stream in program.streams)]
    return {name: thread for thread, name in enumerate(names) if name in used}


def _events(
    program: Program, names: Mapping[OpPosition, str], rank: int, spans: Sequence[Span]
) -> Iterator[Event]:
    threads = _threads(program)
    signals: dict[str, Event] = {}
    # A wait ends after what it waits for, so this order shows every cause before its effect.
    for number, span in enumerate(sorted(spans, key=lambda span: span.end_ns)):
        op = program.section_by_name[span.section].body[span.index]
        effect = effects(op)
        place = {"pid": rank, "tid": threads[effect.stream]}
        yield {
            "ph": "X",
            "name": names[span.position],
            "cat": ops.op_name(type(op)),
            "ts": span.start_ns / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            **place,
            "args": {"section": span.section, "index": span.index, **_facts(program, op)},
        }
        # An arrow belongs to the op whose time it falls into, of which the end is no part.
        inside = {**place, "ts": max(span.start_ns, span.end_ns - 1) / 1000}
        for event in effect.waits:
            if event in signals:
                arrow = {"name": f"!{event}", "cat": "event", "id": f"{rank}.{number}"}
                yield {"ph": "s", **arrow, **signals[event]}
                yield {"ph": "f", "bp": "e", **arrow, **inside}
        signals.update(dict.fromkeys(effect.signals, inside))


def _facts(program: Program, op: ops.Op) -> Event:
    """What is worth knowing of an op beside its name."""
    match op:
        case ops.Compute():
            return {"segment": op.segment, "unit": op.unit}
        case ops.Collective():
            count = sum(size for _, size in payloads(op, program))
            return {"bytes": count, "size": format_bytes(count), "comm": op.comm}
        case _:
            return {}
