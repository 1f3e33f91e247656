"""Prepares the updates of a program on one rank: looks up their tensors, group by group."""

from __future__ import annotations

from functools import partial
from typing import assert_never

from torch import Tensor

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent
from zeroir.ir.optimizers.forms import is_signed
from zeroir.ir.program import Program
from zeroir.runtime.eight_bit.compiled_rounding import CompiledRounding
from zeroir.runtime.eight_bit.update import CodedState, CodedUpdate
from zeroir.runtime.execution.prepared_op import PreparedOp, one_after_the_other
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.optimizers.catalogue import element_update, whole_update
from zeroir.runtime.optimizers.chunked_update import GroupPieces, SpeculativeUpdate
from zeroir.runtime.optimizers.operands import Operands
from zeroir.runtime.optimizers.whole_parameter_operands import prepare_whole_step
from zeroir.runtime.state.state import flat_start


def prepare_update(
    op: ops.StepOp, memory: RankMemory, program: Program, rounding: CompiledRounding | None
) -> PreparedOp:
    """Prepare an op that reads a gradient and the settings of groups.

    ``rounding`` is compiled code for 8-bit states.
    """
    match op:
        case ops.Direction():
            return _directions(op, memory, program)
        case ops.OptimizerStep():
            if op.algorithm.direction_dtype is not None:
                return prepare_whole_step(op, memory, program)
            if op.scales:
                return _coded_update(op, memory, program, rounding)
            return _element_update(op, memory, program)
        case ops.SpeculativeStep():
            return _speculative_update(op, memory, program).speculate
        case ops.CommitStep():
            update = _speculative_update(op, memory, program)
            return partial(update.commit, memory.region(op.redo))
        case _:
            assert_never(op)


def _optional(memory: RankMemory, region: Region | None) -> Tensor | None:
    return None if region is None else memory.region(region)


def _element_update(op: ops.OptimizerStep, memory: RankMemory, program: Program) -> PreparedOp:
    """Prepare one call of the optimizer for each group that has elements in the region on this rank."""
    param, grad = memory.region(op.param), memory.region(op.grad)
    states = [memory.region(state) for state in op.states]
    padding = _padding(op.param, memory, program)
    updates: list[PreparedOp] = []
    for settings in op.settings:
        pieces = _pieces(op.param, settings.group, memory, program)
        operands = Operands(
            params=[param[piece] for piece in pieces],
            grads=[grad[piece] for piece in pieces],
            states=[[state[piece] for piece in pieces] for state in states],
            step=memory.region(op.step),
            lr=memory.region(settings.lr),
            hyper=memory.region(settings.hyper),
            divisor=memory.region(op.gradient_divisor),
            skip=_optional(memory, op.skip),
            padding=padding,
        )
        if pieces:
            updates.append(partial(element_update(op.algorithm).update, operands))
    return one_after_the_other(updates)


def _coded_update(
    op: ops.OptimizerStep,
    memory: RankMemory,
    program: Program,
    rounding: CompiledRounding | None,
) -> PreparedOp:
    """Prepare one step for all groups, because the states are widened and rounded once for all of them."""
    param = memory.region(op.param)
    update = CodedUpdate(
        algorithm=op.algorithm,
        param=param,
        grad=memory.region(op.grad),
        states=[
            CodedState(
                codes=memory.region(codes), absmax=memory.region(absmax), signed=is_signed(name)
            )
            for name, codes, absmax in zip(
                op.algorithm.state_names, op.states, op.scales, strict=True
            )
        ],
        groups=_group_pieces(op, memory, program),
        skip=_optional(memory, op.skip),
        compiled=rounding if param.device.type == "cpu" else None,
    )
    update.prepare()
    return update


def _speculative_update(
    op: ops.SpeculativeStep | ops.CommitStep, memory: RankMemory, program: Program
) -> SpeculativeUpdate:
    return SpeculativeUpdate(
        algorithm=op.algorithm,
        param=memory.region(op.param),
        grad=memory.region(op.grad),
        states=[memory.region(state) for state in op.states],
        kept=[memory.region(kept) for kept in op.kept],
        rounded=_optional(memory, op.rounded),
        groups=_group_pieces(op, memory, program),
    )


def _group_pieces(
    op: ops.OptimizerStep | ops.SpeculativeStep | ops.CommitStep,
    memory: RankMemory,
    program: Program,
) -> list[GroupPieces]:
    """Return the parts of each group of an op on this rank."""
    skip = None if isinstance(op, ops.SpeculativeStep) else op.skip
    padding = _padding(op.param, memory, program)
    return [
        GroupPieces(
            pieces=_pieces(op.param, settings.group, memory, program),
            operands=Operands(
                params=(),
                grads=(),
                states=(),
                step=memory.region(op.step),
                lr=memory.region(settings.lr),
                hyper=memory.region(settings.hyper),
                divisor=memory.region(op.gradient_divisor),
                skip=_optional(memory, skip),
                padding=padding,
            ),
        )
        for settings in op.settings
    ]


def _directions(op: ops.Direction, memory: RankMemory, program: Program) -> PreparedOp:
    """Prepare one call for each group that has elements in the region on this rank."""
    direction, grad = memory.region(op.direction), memory.region(op.grad)
    states = [memory.region(state) for state in op.states]
    updates: list[PreparedOp] = []
    # Without states a direction does not depend on settings.
    for settings in op.settings if op.states else op.settings[:1]:
        pieces = [slice(None)]
        if op.states:
            pieces = _pieces(op.states[0], settings.group, memory, program)
        operands = Operands(
            params=[direction[piece] for piece in pieces],
            grads=[grad[piece] for piece in pieces],
            states=[[state[piece] for piece in pieces] for state in states],
            step=memory.region(op.step),
            lr=memory.region(settings.lr),
            hyper=memory.region(settings.hyper),
            divisor=memory.region(op.gradient_divisor),
            skip=_optional(memory, op.skip),
        )
        updates.append(partial(whole_update(op.algorithm).directions, operands))
    return one_after_the_other(updates)


def _pieces(region: Region, group: str, memory: RankMemory, program: Program) -> list[slice]:
    """Return the parts of a region on this rank that belong to a group, counted from its first local element."""
    mesh = program.mesh
    resting = program.at_rest(region)
    holds = None if resting is None else program.buffer_by_name[resting.buffer].holds
    if resting is None or not isinstance(holds, FlatContent):
        return [slice(0, region.local_numel(mesh))]
    first, stop = resting.local_range(mesh, mesh.coordinate(memory.rank))
    start = flat_start(program, program.buffer_by_name[resting.buffer], memory.rank) + first
    (intervals,) = (g.intervals for g in program.groups if g.name == group)
    clipped = (
        (max(a - start, 0), min(b - start, stop - first))
        for name, a, b in sorted(intervals)
        if name == holds.flat
    )
    return [slice(a, b) for a, b in clipped if a < b]


def _padding(region: Region, memory: RankMemory, program: Program) -> list[Tensor]:
    """Return the parts of a region of parameters on this rank that belong to no parameter."""
    resting = program.at_rest(region)
    holds = None if resting is None else program.buffer_by_name[resting.buffer].holds
    if resting is None or not isinstance(holds, FlatContent):
        return []
    mesh = program.mesh
    first, stop = resting.local_range(mesh, mesh.coordinate(memory.rank))
    start = flat_start(program, program.buffer_by_name[resting.buffer], memory.rank)
    parameters = memory.region(region)
    padding: list[Tensor] = []
    free = first  # All elements before belong to a parameter or are in the list.
    for slot in program.flat_by_name[holds.flat].slots:
        taken = max(slot.offset - start, first)
        if free < min(taken, stop):
            padding.append(parameters[free - first : min(taken, stop) - first])
        free = max(free, slot.offset + slot.numel - start)
    if free < stop:
        padding.append(parameters[free - first : stop - first])
    return padding
