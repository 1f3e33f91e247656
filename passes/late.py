"""Begin buffers as late as nobody can tell.

An ``alloc`` takes no time, but where it stands decides what its buffer may meet: one in front of a wait of its stream
may run before whatever that wait is for, though the op that first uses the buffer cannot. So each moves down to the op
that first touches its buffer, if both are on one stream. It passes no op of that stream that signals an event, since
another stream may learn from that one that the buffer has begun. Nothing else moves, and nothing waits for more.
"""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.passes import rewrite


def allocate_late(program: Program) -> Program:
    """The program with its allocs as far down as nobody can tell."""
    return rewrite.map_sections(program, _lowered)


def _lowered(section: Section) -> Section:
    # Of what comes after an op: who touches each buffer first, on which stream, and who signals first on each stream.
    touching: dict[str, tuple[int, str]] = {}
    signalling: dict[str, int] = {}
    places: dict[int, int] = {}
    for index in reversed(range(len(section.body))):
        op = section.body[index]
        if isinstance(op, ops.Wait):
            continue
        if isinstance(op, ops.Alloc) and op.event is None and op.buffer in touching:
            first, stream = touching[op.buffer]
            if stream == op.stream:
                places[index] = min(first, signalling.get(stream, first))
        if op.event is not None:
            signalling[op.stream] = index
        if isinstance(op, ops.Alloc | ops.Release):
            touching[op.buffer] = index, op.stream
        else:
            effect = effects(op)
            for region in (*effect.reads, *effect.writes, *effect.accumulates):
                touching[region.buffer] = index, op.stream
    before: dict[int, list[Op]] = {}
    for index in sorted(places):
        before.setdefault(places[index], []).append(section.body[index])
    kept: list[Op] = []
    for index, op in enumerate(section.body):
        kept += before.get(index, ())
        if index not in places:
            kept.append(op)
    return replace(section, body=tuple(kept))
