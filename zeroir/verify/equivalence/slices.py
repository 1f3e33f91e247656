"""The slices of micro-batches, which ``zeroir.ir.analysis.micro_batches`` describes.

The pass that lays them out and the engine that fills them have their own functions: one that forgets a kind of buffer
omits it from the schedule and from the run, and must not omit it from the proof as well.
"""

from __future__ import annotations

from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.contents import Micro, WeightContent
from zeroir.ir.program import Program


def is_sliced(program: Program, buffer: Buffer) -> bool:
    """Return whether a buffer has a slice for each micro-batch of a section."""
    match buffer:
        case Buffer(role=Role.INPUT | Role.RNG) | Buffer(holds=WeightContent(micro=Micro.CURRENT)):
            return True
        case _:
            return buffer.name == program.batch_loss


def slice_numel(program: Program, name: str) -> int:
    """Return the number of elements of a slice of a buffer."""
    return program.buffer_by_name[name].numel // program.interleaved


def slice_region(program: Program, name: str, micro_batch: int, numel: int) -> Region:
    """Return the first ``numel`` elements of a micro-batch's slice of a buffer."""
    return Region(buffer=name, offset=slice_numel(program, name) * micro_batch, numel=numel)
