"""The operands, on one rank, of an optimizer step on whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent
from zeroir.ir.copies import at_rest
from zeroir.ir.factors import Factor, factors, preconditioners
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Flat, Program, Slot
from zeroir.runtime import whole_steps
from zeroir.runtime.prepared_op import PreparedOp, one_after_the_other
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.state import flat_start


def prepare_whole_step(op: ops.OptimizerStep, memory: RankMemory, program: Program) -> PreparedOp:
    """One call for each group that has parameters in the flat.

    Raises:
        InternalError: where the updated buffer rests with no flat; no proved program has such a step.
    """
    resting = at_rest(program, op.param)
    holds = None if resting is None else program.buffer_by_name[resting.buffer].holds
    if not isinstance(holds, FlatContent):
        raise InternalError(f"%{op.param.buffer} holds no flat, but {op.algorithm} updates it")
    flat = program.flat_by_name[holds.flat]
    parameters = dict(_parameters(op, memory, program, flat))
    steps: list[PreparedOp] = []
    for settings in op.settings:
        own = [
            parameter
            for slot, parameter in parameters.items()
            if _group(program, flat, slot) == settings.group
        ]
        operands = whole_steps.WholeOperands(
            parameters=own,
            step=memory.region(op.step),
            lr=memory.region(settings.lr),
            hyper=memory.region(settings.hyper),
            skip=None if op.skip is None else memory.region(op.skip),
        )
        if own:
            steps.append(partial(whole_steps.step, op.algorithm, operands))
    return one_after_the_other(steps)


def _group(program: Program, flat: Flat, slot: Slot) -> str | None:
    """The group of a parameter."""
    for group in program.groups:
        for name, start, stop in group.intervals:
            if name == flat.name and start <= slot.offset < stop:
                return group.name
    return None


def _parameters(
    op: ops.OptimizerStep, memory: RankMemory, program: Program, flat: Flat
) -> Iterator[tuple[Slot, whole_steps.WholeParameter]]:
    """The parameters that this rank computes: those that meet its slice, or whose factors it moves."""
    start, stop = _elements(op.param, memory, program)
    param, directions = memory.region(op.param), memory.region(op.grad)
    for slot, with_factors in zip(flat.slots, _factors(op, memory, program, flat), strict=True):
        begin, end = max(slot.offset, start), min(slot.offset + slot.numel, stop)
        elements = slice(slot.offset, slot.offset + slot.numel)
        own = slice(max(begin - start, 0), max(end - start, begin - start, 0))
        parameter = with_factors(
            whole_steps.WholeParameter(
                direction=directions[elements].view(slot.shape),
                param=param[own],
                start=begin - slot.offset,
            )
        )
        is_moving = parameter.rows is not None or bool(parameter.sums and parameter.sums.parts)
        if slot.numel and (begin < end or is_moving):
            yield slot, parameter


_WithFactors = Callable[[whole_steps.WholeParameter], whole_steps.WholeParameter]
"""Adds to a parameter what its algorithm keeps of it."""


def _factors(
    op: ops.OptimizerStep, memory: RankMemory, program: Program, flat: Flat
) -> Iterator[_WithFactors]:
    """For each parameter of the flat, in order."""
    if op.factors is None:
        yield from (lambda parameter: parameter for _ in flat.slots)
        return
    state = memory.region(op.factors)
    if op.algorithm is Algorithm.ADAFACTOR:
        whole = memory.region(op.param if op.whole is None else op.whole)
        for factor in factors(flat):
            yield partial(_with_moments, factor=factor, moments=state, whole=whole)
        return
    start, stop = _elements(op.factors, memory, program)
    everything = state if op.whole is None else memory.region(op.whole)
    for slot, offset in preconditioners(flat):
        sums = _sums(slot, offset, everything, state, range(start, stop))
        yield partial(replace, sums=sums)


def _with_moments(
    parameter: whole_steps.WholeParameter, *, factor: Factor, moments: Tensor, whole: Tensor
) -> whole_steps.WholeParameter:
    slot, middle = factor.slot, factor.offset + factor.rows_numel
    columns = None
    if factor.column_shape is not None:
        columns = moments[middle : factor.offset + factor.numel].view(factor.column_shape)
    return replace(
        parameter,
        whole=whole[slot.offset : slot.offset + slot.numel].view(slot.shape),
        rows=moments[factor.offset : middle].view(factor.row_shape),
        columns=columns,
    )


def _sums(
    slot: Slot, offset: int, everything: Tensor, state: Tensor, own: range
) -> whole_steps.Sums:
    """Shampoo's sums of a parameter; ``own`` are the elements of all sums that ``state`` holds."""
    rows, columns = slot.shape
    matrices: list[Tensor] = []
    parts: list[tuple[Tensor, int, int]] = []
    for side, size in enumerate((rows, columns)):
        matrices.append(everything[offset : offset + size * size].view(size, size))
        begin, end = max(offset, own.start), min(offset + size * size, own.stop)
        if begin < end:
            part = state[begin - own.start : end - own.start]
            parts.append((part, side, begin - offset))
        offset += size * size
    return whole_steps.Sums(rows=matrices[0], columns=matrices[1], parts=parts)


def _elements(region: Region, memory: RankMemory, program: Program) -> tuple[int, int]:
    """The elements of a region on this rank, in the coordinates of what rests there: the first, and behind the last."""
    resting = at_rest(program, region)
    assert resting is not None
    first, stop = resting.local_range(program.mesh, program.mesh.coordinate(memory.rank))
    start = flat_start(program, program.buffer_by_name[resting.buffer], memory.rank)
    return start + first, start + stop
