"""Damages to programs that run several micro-batches unit by unit: what each of these reads, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, at, edit, on_one, pick, put
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.micro_batches import is_sliced, slice_numel
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.common.rewrite import map_regions, used_buffers

_LAST = ".micro1"
"""The end of the names of the temporary buffers of the second micro-batch."""


def _moved_slices(op: Op, program: Program, by_slices: int, by_elements: int) -> Op:
    def moved(region: Region) -> Region:
        if not is_sliced(program, program.buffer_by_name[region.buffer]):
            return region
        slices = (region.offset // slice_numel(program, region.buffer)) + by_slices
        offset = slices % program.interleaved * slice_numel(program, region.buffer)
        return replace(region, offset=offset + by_elements)

    return map_regions(op, moved)


def _other_micro_batch(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """An op reads or writes the slice of another micro-batch."""
    if program.interleaved == 1:
        return None
    return (_moved_slices(op, program, chance.randrange(1, program.interleaved), 0),)


def _shifted_slice(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """An op reads a slice from a wrong element on, in the last one beyond the end of the buffer."""
    if program.interleaved == 1:
        return None
    return (_moved_slices(op, program, 0, chance.choice((-1, 1, 8, 64))),)


def _exchanged(program: Program, chance: Random) -> Program | None:
    """From one op on, or in one op alone, a value of one micro-batch and that of another change places."""
    names = {b.name for b in program.buffers}
    pairs = [(n.removesuffix(_LAST), n) for n in names if n.endswith(_LAST)]
    pairs = sorted(pair for pair in pairs if pair[0] in names)
    if not pairs:
        return None
    one, other = chance.choice(pairs)
    place = pick(program, chance, lambda op: not _named(op).isdisjoint((one, other)))
    if place is None:
        return None
    renamed = {one: other, other: one}

    def change(op: Op) -> Op:
        if isinstance(op, ops.Memory):
            return replace(op, buffer=renamed.get(op.buffer, op.buffer))
        return map_regions(op, lambda r: replace(r, buffer=renamed.get(r.buffer, r.buffer)))

    if chance.random() < 0.5:
        return put(program, place, change(at(program, place)))

    def change_from(body: list[Op]) -> None:
        body[place[1] :] = map(change, body[place[1] :])

    return edit(program, place[0], change_from)


def _left_out(program: Program, chance: Random) -> Program | None:
    """What an op reads of one micro-batch counts twice, and that of another never."""
    kinds = (ops.Cast, ops.Compute, ops.ReduceScatter)
    place = pick(
        program,
        chance,
        lambda op: (
            isinstance(op, kinds) and any(r.buffer.endswith(_LAST) for r in effects(op).reads)
        ),
    )
    if place is None:
        return None
    read = {region.buffer for region in effects(at(program, place)).reads}

    def change(region: Region) -> Region:
        is_read = region.buffer in read
        return replace(region, buffer=region.buffer.removesuffix(_LAST)) if is_read else region

    return put(program, place, map_regions(at(program, place), change))


def _named(op: Op) -> frozenset[str]:
    return frozenset((op.buffer,)) if isinstance(op, ops.Memory) else used_buffers(op)


def _reads_slice(op: Op) -> bool:
    return isinstance(op, ops.Compute | ops.Cast | ops.Scale)


def _group(program: Program, chance: Random) -> Program | None:
    """The program says that its sections run another number of micro-batches."""
    if program.interleaved == 1:
        return None
    return replace(program, interleaved=chance.choice((1, program.interleaved + 1)))


SLICE_MUTATIONS: Mapping[str, Mutation] = {
    "other-micro-batch": on_one(_reads_slice, _other_micro_batch),
    "shift-slice": on_one(_reads_slice, _shifted_slice),
    "exchange-micro-batches": _exchanged,
    "use-micro-batch-twice": _left_out,
    "claim-micro-batches": _group,
}
