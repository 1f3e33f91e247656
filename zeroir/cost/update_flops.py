"""The matrix products of an update: Muon's Newton-Schulz iterations, and Shampoo's sums and their roots."""

from __future__ import annotations

from itertools import accumulate

from zeroir.ir import ops
from zeroir.ir.contents import FlatContent
from zeroir.ir.copies import at_rest
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program, Slot


def update_flops(program: Program, op: ops.Op) -> int:
    """Floating-point operations of an op of the update, on the rank that has most; in ``algorithm.direction_dtype``.

    A rank computes every parameter that meets its slice. The number of iterations is the one that the program begins
    with, of the group that has most.
    """
    if not isinstance(op, ops.OptimizerStep) or not op.algorithm.takes_matrices_alone:
        return 0
    param = at_rest(program, op.param)
    holds = None if param is None else program.buffer_by_name[param.buffer].holds
    if not isinstance(holds, FlatContent):
        return 0
    of_slot, steps = roots_flops, 1
    if op.algorithm is Algorithm.MUON:
        of_slot, steps = iteration_flops, _iterations(program, op)
    numel = op.param.local_numel(program.mesh)
    flat = program.flat_by_name[holds.flat]
    count = flat.padded_numel // numel
    changes = [0] * (count + 1)  # where slices begin, and cease, to meet parameters
    for slot in flat.slots:
        flops = of_slot(slot)
        changes[slot.offset // numel] += flops
        changes[(slot.offset + max(slot.numel, 1) - 1) // numel + 1] -= flops
    return steps * max(accumulate(changes[:-1]))


def _iterations(program: Program, op: ops.OptimizerStep) -> int:
    at = op.algorithm.hyper_names.index("ns_steps")
    values = {scalar.buffer: scalar.values for scalar in program.scalars}
    return max(int(values.get(s.hyper.buffer, (0,) * (at + 1))[at]) for s in op.settings)


def roots_flops(slot: Slot) -> int:
    """Of Shampoo's step of a matrix: the sums, the eigenvectors of each (9 n³), the roots, and two products."""
    rows, columns = slot.shape
    sums = 2 * rows * columns * (rows + columns)
    return 2 * sums + 11 * (rows**3 + columns**3)


def iteration_flops(slot: Slot) -> int:
    """Of one iteration on a matrix: a product with its transpose, the square of that, and a product of both."""
    short, long = min(slot.shape), max(slot.shape)
    return 4 * short * short * long + 2 * short**3
