"""A program as a graph for Graphviz: a cluster per stream, the ops in it, and what orders one after another.

Bold edges are the order of a stream, dashed ones events, thin ones the buffers that one op writes and another reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.effects import Effects, effects
from zeroir.ir.labels import labels
from zeroir.ir.program import OpPosition, Program, Section


def dot(program: Program, *, section: str | None = None) -> str:
    """The graph of one section, or of all side by side, in Graphviz's DOT language."""
    chosen = [shown for shown in program.sections if section in (None, shown.name)]
    names = labels(program)
    lines = [
        "digraph zeroir {",
        "  rankdir=LR; compound=true;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace", fontsize=10];',
        '  edge [fontname="monospace", fontsize=8];',
    ]
    for number, shown in enumerate(chosen):
        lines += (f"  {line}" for line in _section(shown, number, names))
    return "\n".join([*lines, "}"]) + "\n"


def _section(section: Section, number: int, names: Mapping[OpPosition, str]) -> Iterator[str]:
    label = _quoted(section.name)
    yield f"subgraph cluster_{number} {{ label={label};"
    streams = list(dict.fromkeys(effects(op).stream for op in section.body))
    for at, stream in enumerate(streams):
        yield f"  subgraph cluster_{number}_{at} {{ label={_quoted(stream)}; style=dashed;"
        before: str | None = None
        for position, op in section.positioned_ops():
            if effects(op).stream != stream:
                continue
            node = _node(number, position.index)
            yield f"    {node} [label={_quoted(names[position])}, fillcolor={_quoted(_colour(op))}];"
            if before is not None:
                yield f"    {before} -> {node} [style=bold, weight=8];"
            before = node
        yield "  }"
    yield from _events(section, number)
    yield from _flows(section, number)
    yield "}"


def _events(section: Section, number: int) -> Iterator[str]:
    """An edge from what signals an event to each wait; from a point outside where it was signalled before."""
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
    """An edge from the last op that wrote a region to each that reads it or adds to it, named after its buffer."""
    written: dict[str, list[tuple[Region, int]]] = {}
    for index, op in enumerate(section.body):
        effect = effects(op)
        buffers_by_writer: dict[int, set[str]] = {}
        for region in (*effect.reads, *effect.accumulates):
            writer = _last_writer(written.get(region.buffer, []), region)
            if writer is not None:
                buffers_by_writer.setdefault(writer, set()).add(region.buffer)
        for writer, buffers in sorted(buffers_by_writer.items()):
            label = _quoted(", ".join(f"%{name}" for name in sorted(buffers)))
            yield (
                f"  {_node(number, writer)} -> {_node(number, index)} "
                f"[color=gray, constraint=false, label={label}];"
            )
        _note(written, effect, index)


def _note(written: dict[str, list[tuple[Region, int]]], effect: Effects, index: int) -> None:
    for name in (*effect.allocs, *effect.frees):
        written.pop(name, None)
    for region in (*effect.writes, *effect.accumulates):
        written.setdefault(region.buffer, []).append((region, index))


def _last_writer(written: list[tuple[Region, int]], region: Region) -> int | None:
    for earlier, index in reversed(written):
        if earlier.offset < region.stop and region.offset < earlier.stop:
            return index
    return None


def _node(section: int, index: int) -> str:
    return f"op_{section}_{index}"


def _quoted(text: str) -> str:
    """A quoted DOT string, in which a backslash begins an escape and a quotation mark ends it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", "\\n")
    return f'"{plain}"'


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
