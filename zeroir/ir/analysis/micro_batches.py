"""The buffers with one slice for each micro-batch, where a section runs several of them.

With ``Program.interleaved`` = g a micro-step section runs g micro-batches, 0 to g - 1. Inputs, seeds, weights and the
losses of micro-batches have g *slices* of equal length: micro-batch j has the elements from j × slice on. A slice may
be longer than its contents, so that each starts at an aligned place; the rest of it is never read. Evaluations use
slice 0.
"""

from __future__ import annotations

from typing import Final

from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.contents import Micro, WeightContent
from zeroir.ir.program import Program

_ALIGNMENT_BYTES: Final = 64
"""Slices of inputs and seeds start at multiples of this: some kernels are faster there, and compiled ones require it.
"""


def is_sliced(program: Program, buffer: Buffer) -> bool:
    """Return whether a buffer of the program has a slice for each micro-batch."""
    is_weight = isinstance(buffer.holds, WeightContent) and buffer.holds.micro is Micro.CURRENT
    return is_weight or buffer.role in (Role.INPUT, Role.RNG) or buffer.name == program.batch_loss


def slice_numel(program: Program, name: str) -> int:
    """Return the number of elements of a slice of a buffer."""
    return program.buffer_by_name[name].numel // program.interleaved


def slice_region(program: Program, name: str, micro_batch: int, numel: int) -> Region:
    """Return the first ``numel`` elements of a micro-batch's slice of a buffer."""
    offset = micro_batch * slice_numel(program, name)
    return Region(buffer=name, offset=offset, numel=numel)


def aligned_slice_numel(buffer: Buffer) -> int:
    """Return the number of elements of a slice for the contents of a buffer of one micro-batch."""
    if buffer.role not in (Role.INPUT, Role.RNG):
        return buffer.numel
    alignment = max(1, _ALIGNMENT_BYTES // buffer.dtype.itemsize_bytes)
    return -(-buffer.numel // alignment) * alignment
