"""The communication schedule as rows a person reads: bookkeeping left out, equal blocks folded.

``schedule`` lists what moves or computes: segments, collectives, releases of gathered parameters, the update and the
transfers. Allocations, waits and fills are left to the program's text. ``fold`` then replaces runs of rows that differ
only in numbers (``blocks.1`` … ``blocks.30``) by their first instance and a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.contents import FlatContent
from zeroir.ir.effects import effects
from zeroir.ir.program import Program, Section
from zeroir.report.names import op_name

_LONGEST_PERIOD = 64
_SHORTEST_FOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op: its line in the section, what it is, for which unit, and how much it moves or computes.

    ``payload_bytes`` is what a collective or transfer carries on one rank, ``flops`` what a segment computes.
    """

    line: int
    op: str
    stream: str
    unit: str
    detail: str
    payload_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """``repeats`` more instances of the ``period`` rows before, for the units named."""

    repeats: int
    period: int
    units: tuple[str, ...]


def schedule(program: Program, section: Section, *, unit: str | None = None) -> list[Row]:
    """The rows of a section, of one unit or of all."""
    owners = _owners(program)
    rows = (_row(program, owners, line, op) for line, op in enumerate(section.body))
    return [row for row in rows if row is not None and (unit is None or row.unit == unit)]


def fold(rows: Sequence[Row]) -> Iterator[Row | Fold]:
    """Replace repetitions by their first instance and a ``Fold``."""
    shapes = [_shape(row) for row in rows]
    at = 0
    while at < len(rows):
        period, count = _longest_repetition(shapes, at)
        yield from rows[at : at + period]
        if count > 1:
            folded = rows[at + period : at + period * count]
            units = tuple(dict.fromkeys(row.unit for row in folded if row.unit))
            yield Fold(repeats=count - 1, period=period, units=units)
        at += period * count


def _longest_repetition(shapes: Sequence[tuple[object, ...]], at: int) -> tuple[int, int]:
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, (len(shapes) - at) // _SHORTEST_FOLD) + 1):
        pattern = shapes[at : at + period]
        count = 1
        while shapes[at + count * period : at + (count + 1) * period] == pattern:
            count += 1
        if count >= _SHORTEST_FOLD and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _shape(row: Row) -> tuple[object, ...]:
    numbers = re.compile(r"\d+")
    blank = (numbers.sub("#", text) for text in (row.unit, row.detail))
    return (row.op, row.stream, *blank, row.payload_bytes, row.flops)


def _owners(program: Program) -> dict[str, str]:
    """The unit that each buffer belongs to, as far as contents and computes tell."""
    flats = program.flat_by_name
    owners = {
        buffer.name: flats[buffer.holds.flat].unit
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
    }
    for op in program.ops():
        effect = effects(op)
        names = [region.buffer for region in (*effect.reads, *effect.writes, *effect.accumulates)]
        known = op.unit if isinstance(op, ops.Compute) else _first(owners, names)
        if known is not None:
            for name in names:
                if not program.buffer_by_name[name].is_persistent:
                    owners.setdefault(name, known)
    return owners


def _first(owners: dict[str, str], names: Sequence[str]) -> str | None:
    return next((owners[name] for name in names if name in owners), None)


def _row(program: Program, owners: dict[str, str], line: int, op: ops.Op) -> Row | None:
    buffers = program.buffer_by_name

    def size_bytes(regions: Sequence[ops.Region]) -> int:
        return sum(
            region.local_numel(program.mesh) * buffers[region.buffer].dtype.itemsize_bytes
            for region in regions
        )

    def row(unit: str, detail: str, payload_bytes: int = 0, flops: int = 0) -> Row:
        return Row(
            line=line,
            op=op_name(op),
            stream=effects(op).stream,
            unit=unit,
            detail=detail,
            payload_bytes=payload_bytes,
            flops=flops,
        )

    match op:
        case ops.Alloc() | ops.Wait() | ops.Fill():
            return None
        case ops.Release():
            if buffers[op.buffer].role is not Role.GATHERED:
                return None
            return row(owners.get(op.buffer, ""), f"%{op.buffer}")
        case ops.AllGather() | ops.Prefetch() | ops.Broadcast() | ops.AllReduce():
            regions = [pair.destination for pair in op.pairs]
            detail = f"over {program.comm_by_name[op.comm].axis}"
            return row(_units(owners, op), detail, size_bytes(regions))
        case ops.ReduceScatter():
            detail = f"over {program.comm_by_name[op.comm].axis}"
            return row(_units(owners, op), detail, size_bytes([pair.source for pair in op.pairs]))
        case ops.Compute():
            segment = program.segment_by_name[op.segment]
            return row(op.unit, f"@{op.segment}", flops=segment.flops)
        case ops.Cast():
            source, destination = buffers[op.source.buffer], buffers[op.destination.buffer]
            detail = f"%{source.name} {source.dtype} → {destination.dtype}"
            return row(owners.get(op.source.buffer, ""), detail)
        case ops.Scale():
            return row(owners.get(op.region.buffer, ""), f"%{op.region.buffer}")
        case ops.GradNorm() | ops.CheckFinite():
            return row("", f"{len(op.sources)} gradients → %{op.destination.buffer}")
        case ops.Decide():
            clip = "" if op.max_norm is None else f", clipped at {op.max_norm:g}"
            return row("", f"gradients divided by {op.divisor}{clip}")
        case ops.OptimizerStep():
            detail = f"{op.algorithm} on {op.param.local_numel(program.mesh):,} elements"
            return row(owners.get(op.param.buffer, ""), detail)
        case ops.UpdateScale():
            return row("", f"%{op.state.buffer}")
        case ops.ToHost() | ops.ToDevice() | ops.Load() | ops.Store():
            detail = f"%{op.source.buffer} → %{op.destination.buffer}"
            return row(owners.get(op.source.buffer, ""), detail, size_bytes([op.source]))
        case _:
            assert_never(op)


def _units(owners: dict[str, str], op: ops.Collective) -> str:
    names = dict.fromkeys(
        owners[region.buffer]
        for pair in op.pairs
        for region in (pair.source, pair.destination)
        if region.buffer in owners
    )
    return ", ".join(names)
