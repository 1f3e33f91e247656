"""The matrix products of an update: Muon's Newton-Schulz iterations."""

from __future__ import annotations

from itertools import accumulate

from zeroir.ir import ops
from zeroir.ir.contents import FlatContent
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program, Slot


def update_flops(program: Program, op: ops.Op) -> int:
    """Floating-point operations in BF16 of an op of the update, on the rank that has most of them.

    A rank computes every parameter that meets its slice. The number of iterations is the one that the program begins
    with, of the group that has most.
    """
    if not isinstance(op, ops.OptimizerStep) or op.algorithm is not Algorithm.MUON:
        return 0
    holds = program.buffer_by_name[op.param.buffer].holds
    if not isinstance(holds, FlatContent):
        return 0
    at = op.algorithm.hyper_names.index("ns_steps")
    values = {scalar.buffer: scalar.values for scalar in program.scalars}
    steps = max(int(values.get(s.hyper.buffer, (0,) * (at + 1))[at]) for s in op.settings)
    numel = op.param.local_numel(program.mesh)
    flat = program.flat_by_name[holds.flat]
    count = flat.padded_numel // numel
    changes = [0] * (count + 1)  # where slices begin, and cease, to meet parameters
    for slot in flat.slots:
        flops = iteration_flops(slot)
        changes[slot.offset // numel] += flops
        changes[(slot.offset + max(slot.numel, 1) - 1) // numel + 1] -= flops
    return steps * max(accumulate(changes[:-1]))


def iteration_flops(slot: Slot) -> int:
    """Of one iteration on a matrix: a product with its transpose, the square of that, and a product of both."""
    short, long = min(slot.shape), max(slot.shape)
    return 4 * short * short * long + 2 * short**3
