"""A program as a graph for Graphviz: a cluster for each stream with its ops, and edges for their order.

Bold edges are the order of a stream, dashed edges events, and thin edges buffers, from the writer to each reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.labels import labels
from zeroir.ir.buffers import Region
from zeroir.ir.program import OpPosition, Program, Section


def dot(program: Program, *, section: str | None = None) -> str:
    """Return the graph of one section, or of all next to each other, in Graphviz's DOT language."""
    shown = [each for each in program.sections if section in (None, each.name)]
    names = labels(program)
    lines = [
        "digraph zeroir {",
        "  rankdir=LR; compound=true;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace", fontsize=10];',
        '  edge [fontname="monospace", fontsize=8];',
    ]
    for number, each in enumerate(shown):
        lines += (f"  {line}" for line in _section(each, number, names))
    return "\n".join([*lines, "}"]) + "\n"


def _section(section: Section, number: int, names: Mapping[OpPosition, str]) -> Iterator[str]:
    label = _quoted(section.name)
    yield f"subgraph cluster_{number} {{ label={label};"
    streams = list(dict.fromkeys(effects(op).stream for op in section.body))
    for stream_number, stream in enumerate(streams):
        yield f"  subgraph cluster_{number}_{stream_number} {{ label={_quoted(stream)}; style=dashed;"
        previous: str | None = None
        for position, op in section.positioned_ops():
            if effects(op).stream != stream:
                continue
            node = _node(number, position.index)
            yield f"    {node} [label={_quoted(names[position])}, fillcolor={_quoted(_colour(op))}];"
            if previous is not None:
                yield f"    {previous} -> {node} [style=bold, weight=8];"
            previous = node
        yield "  }"
    yield from _events(section, number)
    yield from _flows(section, number)
    yield "}"


def _events(section: Section, number: int) -> Iterator[str]:
    """Yield an edge from the signal of each event to its waits; signals of earlier sections are separate nodes."""
    signals: dict[str, str] = {}
    for pending in section.entry.pending:
        point = _quoted(f"{number}:!{pending.event}")
        yield f"  {point} [label={_quoted(f'!{pending.event} before')}, shape=plaintext];"
        signals[pending.event] = point
    for index, op in enumerate(section.body):
        effect = effects(op)
        for event in effect.waits:
            if event in signals:
                label = _quoted(f"!{event}")
                yield f"  {signals[event]} -> {_node(number, index)} [style=dashed, label={label}];"
        signals.update(dict.fromkeys(effect.signals, _node(number, index)))


def _flows(section: Section, number: int) -> Iterator[str]:
    """Yield an edge from a region's last writer to each op that reads it or adds to it, named after its buffer."""
    writes: dict[str, list[tuple[Region, int]]] = {}
    for index, op in enumerate(section.body):
        effect = effects(op)
        buffers_by_writer: dict[int, set[str]] = {}
        for region in (*effect.reads, *effect.accumulates):
            writer = _last_writer(writes.get(region.buffer, []), region)
            if writer is not None:
                buffers_by_writer.setdefault(writer, set()).add(region.buffer)
        for writer, buffers in sorted(buffers_by_writer.items()):
            label = _quoted(", ".join(f"%{name}" for name in sorted(buffers)))
            yield (
                f"  {_node(number, writer)} -> {_node(number, index)} "
                f"[color=gray, constraint=false, label={label}];"
            )
        for name in (*effect.allocs, *effect.frees):
            writes.pop(name, None)
        for region in (*effect.writes, *effect.accumulates):
            writes.setdefault(region.buffer, []).append((region, index))


def _last_writer(writes: list[tuple[Region, int]], region: Region) -> int | None:
    overlapping = (
        index
        for written, index in reversed(writes)
        if written.offset < region.stop and region.offset < written.stop
    )
    return next(overlapping, None)


def _node(section: int, index: int) -> str:
    return f"op_{section}_{index}"


def _quoted(text: str) -> str:
    """Quote and escape a string for DOT."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", "\\n")
    return f'"{escaped}"'


def _colour(op: ops.Op) -> str:
    match op:
        case ops.Compute():
            return "#d5f0d5"
        case ops.Collective():
            return "#d5e3f7"
        case ops.Update() | ops.Elementwise():
            return "#f7e6d0"
        case ops.Transfer():
            return "#ecd9f2"
        case ops.Alloc() | ops.Release() | ops.Wait():
            return "#eeeeee"
        case _:
            assert_never(op)
