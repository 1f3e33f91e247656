"""The lines of the model that compute the buffers and ops of a program."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment


def buffer_sources(program: Program) -> dict[str, str]:
    """Return ``file:line`` of the model for every buffer that a segment writes first, if the trace recorded it."""
    sources: dict[str, str] = {}
    for op in program.ops():
        if not isinstance(op, ops.Compute):
            continue
        segment = program.segment_by_name[op.segment]
        for value, destination in zip(segment.outputs, op.destinations, strict=True):
            source = "" if destination is None else _source(segment, value)
            if destination is not None and source:
                sources.setdefault(destination.view.region.buffer, source)
    return sources


def op_source(program: Program, op: ops.Op) -> str:
    """Return ``file:line`` of the model for a compute op: that of its last node with one."""
    if not isinstance(op, ops.Compute):
        return ""
    nodes = program.segment_by_name[op.segment].nodes
    return next((node.source for node in reversed(nodes) if node.source), "")


def _source(segment: Segment, value: int) -> str:
    """Return the source of the node that yields a value, or of the nearest node before it with a source."""
    first = len(segment.inputs)
    source = ""
    for node in segment.nodes:
        if value < first:
            break
        source = node.source or source
        first += len(node.results)
    return source


def split_source(source: str) -> tuple[str, int]:
    """Split ``file:line``; the line is 0 if there is none."""
    name, _, line = source.rpartition(":")
    return (name, int(line)) if name and line.isdigit() else (source, 0)
