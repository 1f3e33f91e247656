"""The buffers with one slice for each micro-batch, where a section runs several of them.

With ``Program.interleaved`` = g a micro-step section runs g micro-batches, 0 to g - 1. Inputs, seeds, weights and the
losses of micro-batches have g *slices* of equal length: micro-batch j has the elements from j × slice on. A slice may
be longer than its contents, so that each starts at an aligned place; the rest of it is never read. Evaluations use
slice 0.

Each micro-batch has dims of its own. A size in an op is that of the micro-batch that the op works on, which
``micro_batches_of_ops`` finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.contents import Micro, WeightContent
from zeroir.ir.program import Program, Section
from zeroir.ir.sizes import Size

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
    """Return the number of elements of a slice for the contents of a buffer of one micro-batch, the largest."""
    numel = int(buffer.numel)
    if buffer.role not in (Role.INPUT, Role.RNG):
        return numel
    alignment = max(1, _ALIGNMENT_BYTES // buffer.dtype.itemsize_bytes)
    return -(-numel // alignment) * alignment


def micro_batches_of_ops(program: Program, section: Section) -> tuple[frozenset[int], ...]:
    """Return the micro-batches that each op of a section works on.

    They are those of the slices that it touches, and those of the ops with which it shares the value of a temporary
    buffer, directly or by way of others. Values are activations and whatever has a size that depends on a dim; so
    gathered parameters and sums of gradients, which are those of all micro-batches, connect nothing.
    """
    values = {b.name for b in program.buffers if _is_value(b)}
    sliced = {
        b.name: slice_numel(program, b.name) for b in program.buffers if is_sliced(program, b)
    }
    groups: list[int] = []
    found: dict[int, set[int]] = {}
    users: dict[str, int] = {}

    def group_of(op: int) -> int:
        while groups[op] != op:
            groups[op] = groups[groups[op]]
            op = groups[op]
        return op

    for index, op in enumerate(section.body):
        groups.append(index)
        found[index] = set()
        effect = effects(op)
        for name in effect.allocs:
            users.pop(name, None)
        for region in _regions(effect):
            if region.buffer in sliced:
                found[index].update(_slices(region, sliced[region.buffer]))
        touched = (region.buffer for region in _regions(effect))
        for name in values.intersection((*touched, *effect.allocs, *effect.frees)):
            user = users.setdefault(name, index)
            one, other = sorted((group_of(user), group_of(index)))
            if one != other:
                groups[other] = one
                found[one] |= found.pop(other)
    return tuple(frozenset(found[group_of(index)]) for index in range(len(groups)))


def _is_value(buffer: Buffer) -> bool:
    is_sized = isinstance(buffer.numel, Size)
    return not buffer.is_persistent and (is_sized or buffer.role in (Role.ACTIVATION, Role.SAVED))


def _regions(effect: Effects) -> Iterator[Region]:
    yield from effect.reads
    yield from effect.writes
    yield from effect.accumulates


def _slices(region: Region, numel: int) -> Iterator[int]:
    """Yield the first and the last slice that a region is in; a region of no elements is in the first alone."""
    numel = max(1, numel)
    yield int(region.offset) // numel
    yield (int(region.offset) + max(0, int(region.numel) - 1)) // numel
