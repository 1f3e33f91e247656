"""Where the bytes of a buffer come from: the line of the model that computes them."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.ir.segment import Segment


def buffer_sources(program: Program) -> dict[str, str]:
    """``file:line`` of the model for every buffer that a segment is the first to write, where the trace knows it."""
    found: dict[str, str] = {}
    for op in program.ops():
        if not isinstance(op, ops.Compute):
            continue
        segment = program.segment_by_name[op.segment]
        for value, destination in zip(segment.outputs, op.destinations, strict=True):
            source = "" if destination is None else _source(segment, value)
            if destination is not None and source:
                found.setdefault(destination.view.region.buffer, source)
    return found


def op_source(program: Program, op: ops.Op) -> str:
    """``file:line`` of the model that a compute op comes from: of its last node that has one."""
    if not isinstance(op, ops.Compute):
        return ""
    nodes = program.segment_by_name[op.segment].nodes
    return next((node.source for node in reversed(nodes) if node.source), "")


def _source(segment: Segment, value: int) -> str:
    """The source of the node that yields a value, or of the nearest before it that has one."""
    first = len(segment.inputs)
    found = ""
    for node in segment.nodes:
        if value < first:
            break
        found = node.source or found
        first += len(node.results)
    return found


def split_source(source: str) -> tuple[str, int]:
    """The file and the line of ``file:line``; line 0 where there is none."""
    name, _, line = source.rpartition(":")
    return (name, int(line)) if name and line.isdigit() else (source, 0)
