"""The communication schedule as rows for a reader: without bookkeeping, with equal blocks folded.

``schedule`` lists segments, collectives, releases of gathered parameters, the update and transfers; only the text of
the program has allocations, waits and fills. ``fold`` replaces sequences of rows that differ only in the numbers of
names (``blocks.1`` … ``blocks.30``) by their first instance and a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.contents import FlatContent
from zeroir.ir.program import Program, Section
from zeroir.report.names import counted

_LONGEST_PERIOD = 64
_SHORTEST_FOLD = 3
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(r"[%@]\S+")
_COMPUTE = ops.op_name(ops.Compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op: its line in the section, its name, its stream, its units and its size.

    ``payload_bytes`` are the bytes that a collective or a transfer moves on one rank, ``flops`` the floating-point
    operations of a segment.
    """

    line: int
    op: str
    stream: str
    units: tuple[str, ...]
    detail: str
    payload_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """``repeats`` more instances of the preceding ``period`` rows.

    ``units`` are those of its computes, or of all ops.
    """

    repeats: int
    period: int
    units: tuple[str, ...]


def schedule(program: Program, section: Section, *, unit: str | None = None) -> list[Row]:
    """Return the rows of a section, of one unit or of all."""
    owners = buffer_owners(program)
    rows = (_row(program, owners, line, op) for line, op in enumerate(section.body))
    return [row for row in rows if row is not None and (unit is None or unit in row.units)]


def fold(rows: Sequence[Row]) -> Iterator[Row | Fold]:
    """Replace repetitions by their first instance and a ``Fold``."""
    shapes = [_shape(row) for row in rows]
    start = 0
    while start < len(rows):
        period, count = _longest_repetition(shapes, start)
        yield from rows[start : start + period]
        if count > 1:
            folded = rows[start + period : start + period * count]
            named = [row for row in folded if row.op == _COMPUTE] or folded
            units = tuple(dict.fromkeys(unit for row in named for unit in row.units))
            yield Fold(repeats=count - 1, period=period, units=units)
        start += period * count


def _longest_repetition(shapes: Sequence[tuple[object, ...]], start: int) -> tuple[int, int]:
    """Return the period and the count of the repetition at ``start`` that covers the most rows; (1, 1) without one."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, (len(shapes) - start) // _SHORTEST_FOLD) + 1):
        pattern = shapes[start : start + period]
        count = 1
        while shapes[start + count * period : start + (count + 1) * period] == pattern:
            count += 1
        if count >= _SHORTEST_FOLD and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _shape(row: Row) -> tuple[object, ...]:
    """Return the row without the numbers in its names; rows of equal blocks have equal shapes."""
    units = tuple(_NUMBER.sub("#", unit) for unit in row.units)
    detail = _NAME.sub(lambda name: _NUMBER.sub("#", name[0]), row.detail)
    return (row.op, row.stream, units, detail, row.payload_bytes, row.flops)


def buffer_owners(program: Program) -> dict[str, str]:
    """Return the unit of each buffer: that of its flat if contents or computes name one, or of its first writer."""
    flats, homes = program.flat_by_name, program.parameter_by_name
    owners = {
        buffer.name: flats[buffer.holds.flat].unit
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
    }
    first_writers: dict[str, str] = {}
    for op in program.ops():
        if not isinstance(op, ops.Compute):
            continue
        for argument in op.arguments:
            if argument.parameter is not None:
                owners.setdefault(argument.view.region.buffer, homes[argument.parameter][0].unit)
        for destination in filter(None, op.destinations):
            name = destination.view.region.buffer
            if destination.gradient is not None:
                owners.setdefault(name, homes[destination.gradient][0].unit)
            elif not program.buffer_by_name[name].is_persistent:
                first_writers.setdefault(name, op.unit)
    return {**first_writers, **owners}


def _row(program: Program, owners: dict[str, str], line: int, op: ops.Op) -> Row | None:
    buffers = program.buffer_by_name

    def row(units: tuple[str, ...], detail: str, payload_bytes: int = 0, flops: int = 0) -> Row:
        return Row(
            line=line,
            op=ops.op_name(type(op)),
            stream=effects(op).stream,
            units=units,
            detail=detail,
            payload_bytes=payload_bytes,
            flops=flops,
        )

    def units_of(*names: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(owners[name] for name in names if name in owners))

    match op:
        case ops.Alloc() | ops.Wait() | ops.Fill():
            return None
        case ops.Release():
            if buffers[op.buffer].role is not Role.GATHERED:
                return None
            return row(units_of(op.buffer), f"%{op.buffer}")
        case ops.Collective():
            names = [r.buffer for pair in op.pairs for r in (pair.source, pair.destination)]
            detail = f"over {program.comm_by_name[op.comm].axis}"
            return row(units_of(*names), detail, payload_bytes(op, program))
        case ops.Compute():
            segment = program.segment_by_name[op.segment]
            return row((op.unit,), f"@{op.segment}", flops=segment.flops)
        case ops.Cast():
            source, destination = buffers[op.source.buffer], buffers[op.destination.buffer]
            arrow = "→" if op.mode is ops.Mode.WRITE else "→ +="
            detail = f"%{source.name} {source.dtype} {arrow} {destination.dtype}"
            return row(units_of(source.name, destination.name), detail)
        case ops.Scale():
            return row(units_of(op.region.buffer), f"%{op.region.buffer}")
        case ops.GradNorm() | ops.CheckFinite():
            return row((), f"{counted(len(op.sources), 'gradient')} → %{op.destination.buffer}")
        case ops.Guess():
            return row((), f"gradients divided by {op.divisor}, and not clipped")
        case ops.Decide():
            clip = "" if op.max_norm is None else f", clipped at {op.max_norm:g}"
            return row((), f"gradients divided by {op.divisor}{clip}")
        case ops.OptimizerStep() | ops.SpeculativeStep() | ops.CommitStep():
            numel = op.param.local_numel(program.mesh)
            groups = f" in {len(op.settings)} groups" if op.others else ""
            what = f"{op.algorithm} on {counted(numel, 'element')}{groups}"
            return row(units_of(op.param.buffer), what)
        case ops.Direction():
            numel = op.grad.local_numel(program.mesh)
            detail = f"{op.algorithm} on {counted(numel, 'element')}"
            return row(units_of(op.direction.buffer), detail)
        case ops.Average():
            numel = op.param.local_numel(program.mesh)
            return row(units_of(op.param.buffer), f"{op.decay:g} on {counted(numel, 'element')}")
        case ops.UpdateScale():
            return row((), f"%{op.state.buffer}")
        case ops.Transfer():
            source, destination = buffers[op.source.buffer], buffers[op.destination.buffer]
            detail = f"%{source.name} → %{destination.name}"
            size = op.source.local_numel(program.mesh) * source.dtype.itemsize_bytes
            return row(units_of(source.name, destination.name), detail, size)
        case _:
            assert_never(op)
