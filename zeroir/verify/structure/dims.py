"""Dims: sizes that differ between micro-batches are those of a rank's own values, and of nothing that ranks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.instances import (
    SIZED_FIELDS,
    sizes_and_offsets_in,
    sizes_in,
    sizes_in_segment,
    sizes_of_values,
)
from zeroir.ir.buffers import Region, Role
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, Program, Section
from zeroir.ir.size_bounds import grows, lowest
from zeroir.ir.sizes import RESERVED_NAMES, Size
from zeroir.verify.context import Findings, spell, title
from zeroir.verify.equivalence.slices import is_sliced, micro_batches_of_lines


def check_dims(program: Program, findings: Findings) -> None:
    """Report sizes that may not depend on a dim, and dims that no batch tells (Z203)."""
    # Without dims in its text or file no program has sizes in its ops, so that of its buffers is all to look at.
    if not program.dims and not any(isinstance(b.numel, Size) for b in program.buffers):
        return
    for sentence in _header_problems(program):
        findings.add("Z203", sentence)
    if findings.items:
        return
    sized = {b.name for b in program.buffers if isinstance(b.numel, Size)}
    for section in program.sections:
        for line, op in enumerate(section.body):
            effect = effects(op)
            regions = (*effect.reads, *effect.writes, *effect.accumulates)
            problem = _op_problem(op, regions, sized) or _place_problem(regions, program)
            if problem is not None:
                findings.add("Z203", f"{title(op)} {problem}", section=section, line=line)
        if program.interleaved > 1:
            for line, problem in _mixed_dims(program, section):
                sentence = f"{title(section.body[line])} {problem}"
                findings.add("Z203", sentence, section=section, line=line)


def _header_problems(program: Program) -> Iterator[str]:
    declared = {dim.name: dim for dim in program.dims}
    fields = tuple(getattr(program, name) for name in SIZED_FIELDS if name != "segments")
    sizes, offsets = sizes_and_offsets_in(fields)
    in_segments = chain.from_iterable(map(sizes_in_segment, program.segments))
    for size in dict.fromkeys(chain(sizes, offsets, in_segments)):
        unknown = next((dim for dim in size.dims if declared.get(dim.name) != dim), None)
        if unknown is not None:
            yield f"the size {size} depends on {unknown.name}, which is not declared with that range"
    # Arguments of operators may be any numbers, and regions have a law of their own.
    of_values = chain.from_iterable(map(sizes_of_values, program.segments))
    for size in dict.fromkeys(chain(sizes, of_values)):
        if not grows(size):
            yield f"the size {size} may shrink where a dim grows, so that memory is not planned for its largest value"
    header = (field.name for field in dataclasses.fields(program))
    others = tuple(getattr(program, name) for name in header if name not in SIZED_FIELDS)
    for size in sizes_in(others):
        yield f"the size {size} stands in the header where ranks need one size"
    has_slices = program.interleaved > 1
    for buffer in program.buffers:
        is_kept = buffer.is_persistent and buffer.role not in (Role.INPUT, Role.OUTPUT)
        if isinstance(buffer.numel, Size) and is_kept:
            yield f"%{buffer.name} keeps its content between steps, and its size {buffer.numel} depends on a dim"
        elif isinstance(buffer.numel, Size) and has_slices and is_sliced(program, buffer):
            yield f"%{buffer.name} has a slice for each micro-batch, and its size {buffer.numel} depends on a dim"
    shapes = chain.from_iterable(binding.shape for binding in program.inputs)
    of_inputs = (size for size in shapes if isinstance(size, Size))
    told = {linear.dim for size in of_inputs if (linear := size.linear) is not None}
    for dim in program.dims:
        if not dim.name.isidentifier() or not dim.name.isascii() or dim.name in RESERVED_NAMES:
            yield f"the dim {dim.name} is no name that a size can have in the text"
        elif not 0 <= dim.minimum < dim.maximum:
            yield f"the dim {dim.name} is from {dim.minimum} to {dim.maximum}"
        elif dim not in told:
            yield f"no input tells the dim {dim.name}: none has a dimension that is a multiple of it plus a number"


def _mixed_dims(program: Program, section: Section) -> Iterator[tuple[int, str]]:
    """Yield the lines of ops whose dims are not those of one micro-batch, and why."""
    count = program.interleaved if section.name in (MICRO_STEP, LAST_MICRO_STEP) else 1
    for line, of_op in enumerate(micro_batches_of_lines(program, section)):
        op = section.body[line]
        if len(of_op) == 1 and max(of_op) < count:
            continue
        segment = program.segment_by_name.get(op.segment) if isinstance(op, ops.Compute) else None
        in_segment = () if segment is None else sizes_in_segment(segment)
        if not in_segment and not sizes_in(op):
            continue
        if of_op:
            numbers = ", ".join(map(str, sorted(of_op)))
            yield (
                line,
                f"has a size that depends on a dim, and works on micro-batches {numbers} of {count}",
            )
        else:
            yield line, "has a size that depends on a dim, and works on no micro-batch's values"


def _op_problem(op: ops.Op, regions: Sequence[Region], sized: set[str]) -> str | None:
    """Return why an op may not have a size that depends on a dim; None if it has none, or may have it."""
    match op:
        case ops.Collective() | ops.Update() | ops.Scale() | ops.Wait():
            shared = next((r.buffer for r in regions if r.buffer in sized), None)
            if shared is not None:
                return f"works on %{shared}, whose size depends on a dim, while ranks need one size"
            if sizes_in(op):
                return "has a size that depends on a dim, while ranks need one size"
        case _:
            pass
    return None


def _place_problem(regions: Sequence[Region], program: Program) -> str | None:
    """Return why a region may leave its buffer for some values of dims; None if none does.

    One that begins later where a dim grows is inside for all values if it is inside for the largest and the smallest.
    """
    for region in regions:
        if isinstance(region.offset, Size) and not grows(region.offset):
            buffer = program.buffer_by_name.get(region.buffer)
            rest = -1 if buffer is None else buffer.numel - region.stop
            if lowest(region.offset) < 0 or lowest(rest) < 0:
                return f"works on {spell(region, program)}, which may not be inside its buffer for all values of dims"
    return None
