"""Which computes of a section are its forward, its backward, or the forward's recomputation for the backward.

This is derived from data dependences, not from names. The backward begins at the loss scale, the only scalar that a
segment of a micro-step reads, and every compute that depends on it is part of the backward. Of the others, the forward
is what the loss depends on; no loss depends on what is recomputed.
"""

from __future__ import annotations

from enum import StrEnum

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program, Section


class ComputePhase(StrEnum):
    """The part of a micro-step to which a compute belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"


def phases(program: Program, section: Section) -> dict[int, ComputePhase]:
    """Return the phase of each compute op by its index; empty if the section computes no loss, like ``update``."""
    backward = _backward(program, section)
    forward = _before_the_loss(program, section, backward)
    if not forward:
        return {}
    return {
        index: ComputePhase.BACKWARD
        if index in backward
        else ComputePhase.FORWARD
        if index in forward
        else ComputePhase.RECOMPUTED
        for index, op in enumerate(section.body)
        if isinstance(op, ops.Compute)
    }


def _losses(program: Program) -> set[str]:
    return {
        name for name in (program.loss, program.eval_loss, program.batch_loss) if name is not None
    }


def _backward(program: Program, section: Section) -> set[int]:
    """Return the ops whose results depend on a scalar other than the loss, or that write a gradient."""
    scalars = {buffer.name for buffer in program.buffers if buffer.role is Role.SCALAR}
    dependent = scalars - _losses(program)
    indices: set[int] = set()
    for index, op in enumerate(section.body):
        effect = effects(op)
        written = {region.buffer for region in (*effect.writes, *effect.accumulates)}
        is_dependent = any(region.buffer in dependent for region in effect.reads)
        if isinstance(op, ops.Compute):
            is_dependent |= any(d is not None and d.gradient is not None for d in op.destinations)
        if is_dependent:
            indices.add(index)
            dependent |= written
        dependent -= set(effect.allocs)
    return indices


def _before_the_loss(program: Program, section: Section, backward: set[int]) -> set[int]:
    """Return the ops outside the backward on which a loss of the section depends."""
    needed = _losses(program)
    indices: set[int] = set()
    for index in reversed(range(len(section.body))):
        effect = effects(section.body[index])
        written = {region.buffer for region in (*effect.writes, *effect.accumulates)}
        if index not in backward and written & needed:
            indices.add(index)
            needed |= {region.buffer for region in effect.reads}
        needed -= set(effect.allocs)
    return {index for index in indices if isinstance(section.body[index], ops.Compute)}
