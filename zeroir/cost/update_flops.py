"""The matrix products of an update on whole parameters, as its optimizer declares them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zeroir.ir import ops
from zeroir.ir.contents import FlatContent
from zeroir.ir.hyper_parameters import first_hyper
from zeroir.ir.program import Flat, Program


def update_flops(program: Program, op: ops.Op) -> int:
    """Return the FLOPs of an op of the update, on the rank with the most; in ``algorithm.direction_dtype``.

    A rank computes every parameter that overlaps its slice. Hyper-parameters are those with which the program starts,
    of the group with the largest result.
    """
    if not isinstance(op, ops.OptimizerStep) or op.algorithm.declaration.whole is None:
        return 0
    param = program.at_rest(op.param)
    holds = None if param is None else program.buffer_by_name[param.buffer].holds
    if not isinstance(holds, FlatContent):
        return 0
    flops = op.algorithm.declaration.whole.flops
    flat, numel = program.flat_by_name[holds.flat], op.param.local_numel(program.mesh)
    return max(
        _on_one_rank(flat, numel, [flops(slot.shape, hyper) for slot in flat.slots])
        for hyper in first_hyper(program, op)
    )


def _on_one_rank(flat: Flat, numel: int, flops: Sequence[int]) -> int:
    """Return the largest sum for the parameters that overlap a slice of ``numel`` elements."""
    count = flat.padded_numel // numel
    changes = [0] * (count + 1)  # where slices begin and stop to overlap parameters
    for slot, own in zip(flat.slots, flops, strict=True):
        changes[slot.offset // numel] += own
        changes[(slot.offset + max(slot.numel, 1) - 1) // numel + 1] -= own
    return max(accumulate(changes[:-1]))
