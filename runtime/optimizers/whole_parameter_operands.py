"""The operands, on one rank, of an optimizer step on whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent
from zeroir.ir.own_coordinates import PlacedPart, placed_parts
from zeroir.ir.program import Flat, Program, Slot
from zeroir.runtime.execution.prepared_op import PreparedOp, one_after_the_other
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.optimizers.catalogue import whole_update
from zeroir.runtime.optimizers.operands import KeptPart, WholeOperands, WholeParameter
from zeroir.runtime.state.state import flat_start


def prepare_whole_step(op: ops.OptimizerStep, memory: RankMemory, program: Program) -> PreparedOp:
    """Prepare one call for each group that has parameters in the flat.

    Raises:
        InternalError: where the updated buffer holds no flat between steps; no verified program has such a step.
    """
    resting = program.at_rest(op.param)
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
        operands = WholeOperands(
            parameters=own,
            step=memory.region(op.step),
            lr=memory.region(settings.lr),
            hyper=memory.region(settings.hyper),
            skip=None if op.skip is None else memory.region(op.skip),
        )
        if own:
            steps.append(partial(whole_update(op.algorithm).step, operands))
    return one_after_the_other(steps)


def _group(program: Program, flat: Flat, slot: Slot) -> str | None:
    """Return the group of a parameter."""
    for group in program.groups:
        for name, start, stop in group.intervals:
            if name == flat.name and start <= slot.offset < stop:
                return group.name
    return None


def _parameters(
    op: ops.OptimizerStep, memory: RankMemory, program: Program, flat: Flat
) -> Iterator[tuple[Slot, WholeParameter]]:
    """Yield the parameters that this rank updates: those in its slice, or of whose state it keeps a part."""
    start, stop = _elements(op.param, memory, program)
    param, directions = memory.region(op.param), memory.region(op.grad)
    declared = op.algorithm.declaration.whole
    whole = None
    if declared is not None and declared.reads_parameters:
        whole = memory.region(op.param if op.whole is None else op.whole)
    for slot, kept in zip(flat.slots, _kept(op, memory, program, flat), strict=True):
        begin, end = max(slot.offset, start), min(slot.offset + slot.numel, stop)
        elements = slice(slot.offset, slot.offset + slot.numel)
        own = slice(max(begin - start, 0), max(end - start, begin - start, 0))
        if slot.numel and (begin < end or any(part.own.numel() for part in kept)):
            yield (
                slot,
                WholeParameter(
                    direction=directions[elements].view(slot.shape),
                    param=param[own],
                    start=begin - slot.offset,
                    whole=None if whole is None else whole[elements].view(slot.shape),
                    kept=kept,
                ),
            )


def _kept(
    op: ops.OptimizerStep, memory: RankMemory, program: Program, flat: Flat
) -> Iterator[tuple[KeptPart, ...]]:
    """Yield the states that the optimizer keeps of each parameter of the flat, in order."""
    state = op.algorithm.declaration.own_state
    if state is None or op.factors is None:
        yield from (() for _ in flat.slots)
        return
    first, stop = _elements(op.factors, memory, program)
    own = memory.region(op.factors)
    whole = memory.region(op.whole) if state.is_sharded and op.whole is not None else own

    def kept(part: PlacedPart) -> KeptPart:
        begin, end = max(part.offset, first), min(part.stop, stop)
        return KeptPart(
            whole=whole[part.offset : part.stop].view(part.shape),
            own=own[begin - first : end - first] if begin < end else own[:0],
            start=begin - part.offset,
        )

    for parts in placed_parts(state.quantity, (slot.shape for slot in flat.slots)):
        yield tuple(map(kept, parts))


def _elements(region: Region, memory: RankMemory, program: Program) -> tuple[int, int]:
    """Return the first element of a region on this rank and its end, as indices of the flat that it holds at rest."""
    resting = program.at_rest(region)
    assert resting is not None
    first, stop = resting.local_range(program.mesh, program.mesh.coordinate(memory.rank))
    start = flat_start(program, program.buffer_by_name[resting.buffer], memory.rank)
    return start + first, start + stop
