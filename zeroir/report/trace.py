"""A recorded or simulated step in the trace event format, which Perfetto and Chrome's tracing page read.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Each rank is a
process, each stream a thread and each op a complete event (``X``); an arrow (``s`` to ``f``) connects the op that
signals an event with each wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zeroir.artifact.schema import program_digest
from zeroir.cost.simulate import Simulation
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.labels import labels
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.mesh import HOST
from zeroir.ir.program import OpPosition, Program
from zeroir.ir.spans import Span

Event = Mapping[str, object]


def simulated_trace(program: Program, simulation: Simulation) -> dict[str, object]:
    """Return the trace of a simulated step: a process for each class of ranks, named after its first rank."""
    classes = simulation.classes
    trace = chrome_trace(
        program,
        [rank_class.spans for rank_class in classes],
        step=1,
        names=[rank_class.label for rank_class in classes],
    )
    trace["otherData"] = {
        "machine": simulation.machine,
        "ranks": simulation.world_size,
        **_identity(program),
    }
    return trace


def chrome_trace(
    program: Program,
    ranks: Sequence[Sequence[Span]],
    *,
    step: int,
    names: Sequence[str] | None = None,
) -> dict[str, object]:
    """Return the trace of one step as a JSON document; ``ranks`` are the spans of each rank, on one clock.

    ``names`` are the names of the processes; the default is ``rank 0``, ``rank 1`` and so on.
    """
    op_labels = labels(program)
    events: list[Event] = []
    for rank, spans in enumerate(ranks):
        events += _headings(program, rank, f"rank {rank}" if names is None else names[rank])
        events += _events(program, op_labels, rank, spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "ranks": len(ranks), **_identity(program)},
    }


def _identity(program: Program) -> dict[str, str]:
    """Return the fingerprint of the model, and the digest that identifies the program."""
    return {"fingerprint": program.fingerprint, "program": program_digest(program)}


def _headings(program: Program, rank: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for stream, thread in _threads(program).items():
        place = {"pid": rank, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}


def _threads(program: Program) -> dict[str, int]:
    """Assign numbers to the streams that the program uses in the order of declaration, with the host first."""
    used = {effects(op).stream for op in program.ops()}
    streams = [HOST, *(stream.name for stream in program.streams)]
    return {stream: thread for thread, stream in enumerate(streams) if stream in used}


def _events(
    program: Program, op_labels: Mapping[OpPosition, str], rank: int, spans: Sequence[Span]
) -> Iterator[Event]:
    threads = _threads(program)
    signals: dict[str, Event] = {}
    # A wait ends after the op that signals its event, so in this order each signal precedes its waits.
    for number, span in enumerate(sorted(spans, key=lambda span: span.end_ns)):
        op = program.section_by_name[span.section].body[span.index]
        effect = effects(op)
        place = {"pid": rank, "tid": threads[effect.stream]}
        yield {
            "ph": "X",
            "name": op_labels[span.position],
            "cat": ops.op_name(type(op)),
            "ts": span.start_ns / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            **place,
            "args": {"section": span.section, "index": span.index, **_facts(program, op)},
        }
        # A viewer draws an arrow at the op that runs at its time, and no op runs at its own end.
        inside = {**place, "ts": max(span.start_ns, span.end_ns - 1) / 1000}
        for event in effect.waits:
            if event in signals:
                arrow = {"name": f"!{event}", "cat": "event", "id": f"{rank}.{number}"}
                yield {"ph": "s", **arrow, **signals[event]}
                yield {"ph": "f", "bp": "e", **arrow, **inside}
        signals.update(dict.fromkeys(effect.signals, inside))


def _facts(program: Program, op: ops.Op) -> Event:
    """Return the details of an op besides its name."""
    match op:
        case ops.Compute():
            return {"segment": op.segment, "unit": op.unit}
        case ops.Collective():
            count = payload_bytes(op, program)
            return {"bytes": count, "size": format_bytes(count), "comm": op.comm}
        case _:
            return {}
