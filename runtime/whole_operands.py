"""The operands, on one rank, of an optimizer step on whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.contents import FlatContent
from zeroir.ir.factors import factors
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
    holds = program.buffer_by_name[op.param.buffer].holds
    if not isinstance(holds, FlatContent):
        raise InternalError(f"%{op.param.buffer} holds no flat, but {op.algorithm} updates it")
    flat = program.flat_by_name[holds.flat]
    parameters = dict(_parameters(op, memory, program, flat))
    steps: list[PreparedOp] = []
    for settings in op.settings:
        own = [
            parameter
            for slot, parameter in parameters.items()
            if _group(program, flat, slot, op.group) == settings.group
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


def _group(program: Program, flat: Flat, slot: Slot, default: str) -> str:
    """The group of a parameter; ``default`` where the program declares none."""
    for group in program.groups:
        for name, start, stop in group.intervals:
            if name == flat.name and start <= slot.offset < stop:
                return group.name
    return default


def _parameters(
    op: ops.OptimizerStep, memory: RankMemory, program: Program, flat: Flat
) -> Iterator[tuple[Slot, whole_steps.WholeParameter]]:
    """The parameters that this rank computes: those that meet its slice, or all where it moves their factors."""
    mesh = program.mesh
    first, stop = op.param.local_range(mesh, mesh.coordinate(memory.rank))
    start = flat_start(program, program.buffer_by_name[op.param.buffer], memory.rank) + first
    stop += start - first
    param, directions = memory.region(op.param), memory.region(op.grad)
    moments = None if op.factors is None else memory.region(op.factors)
    whole = param if op.whole is None else memory.region(op.whole)
    for factor in factors(flat):
        slot = factor.slot
        begin, end = max(slot.offset, start), min(slot.offset + slot.numel, stop)
        elements = slice(slot.offset, slot.offset + slot.numel)
        if not slot.numel or (begin >= end and moments is None):
            continue
        rows = columns = None
        if moments is not None:
            middle = factor.offset + factor.rows_numel
            rows = moments[factor.offset : middle].view(factor.row_shape)
            if factor.column_shape is not None:
                columns = moments[middle : factor.offset + factor.numel].view(factor.column_shape)
        yield (
            slot,
            whole_steps.WholeParameter(
                direction=directions[elements].view(slot.shape),
                param=param[max(begin - start, 0) : max(end - start, begin - start, 0)],
                start=begin - slot.offset,
                whole=None if moments is None else whole[elements].view(slot.shape),
                rows=rows,
                columns=columns,
            ),
        )
