"""Moves a logical program, made for one device, to the ranks of a mesh axis: flats grow to a multiple of their number.

Parameters keep their offsets; only the zeros at the end of a flat grow. Every buffer in a flat's coordinates, and every
op that names such a buffer as a whole, grows with it; the parameters that compute ops name do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.layout import padded_numel, used_numel
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import Flat, Program, Section
from zeroir.passes.common import rewrite


def resize(program: Program, axis: Axis) -> Program:
    """Return the logical program on a mesh of one axis, with every rank doing the same."""
    flats = {
        flat.name: replace(flat, padded_numel=padded_numel(used_numel(flat), axis.size))
        for flat in program.flats
    }
    before = program.flat_by_name
    homes = {buffer: flats[flat.name] for buffer, flat in rewrite.flat_of_buffer(program).items()}
    buffers = {
        name: replace(buffer, numel=rewrite.full_numel(buffer, homes[name]))
        if name in homes
        else buffer
        for name, buffer in program.buffer_by_name.items()
    }

    def grown(region: Region) -> Region:
        if region.stop != program.buffer_by_name[region.buffer].numel:
            return region
        return replace(region, numel=buffers[region.buffer].numel - region.offset)

    def rewritten(section: Section) -> Section:
        body = tuple(
            op if isinstance(op, ops.Compute) else rewrite.map_regions(op, grown)
            for op in section.body
        )
        return replace(
            section,
            entry=rewrite.map_state(section.entry, grown),
            body=_fill_tails(body, program, homes),
            exit=rewrite.map_state(section.exit, grown),
        )

    return replace(
        rewrite.map_sections(program, rewritten),
        mesh=Mesh(axes=(axis,)),
        flats=tuple(flats.values()),
        buffers=tuple(buffers.values()),
        groups=tuple(
            replace(
                group,
                intervals=tuple(
                    (
                        name,
                        start,
                        flats[name].padded_numel if stop == before[name].padded_numel else stop,
                    )
                    for name, start, stop in group.intervals
                ),
            )
            for group in program.groups
        ),
    )


def _fill_tails(
    body: tuple[Op, ...], program: Program, homes: Mapping[str, Flat]
) -> tuple[Op, ...]:
    """Zero the padding at the end of temporary gradients that had none until they grew."""
    new_tails = {
        buffer: flat
        for buffer, flat in rewrite.contributed_buffers(program).items()
        if used_numel(flat) == flat.padded_numel < homes[buffer].padded_numel
    }
    filled = {
        op.destination.buffer
        for op in body
        if isinstance(op, ops.Fill)
        and op.destination.buffer in new_tails
        and op.destination.stop == homes[op.destination.buffer].padded_numel
    }
    after: dict[int, list[Op]] = {}
    for index, op in enumerate(body):
        if isinstance(op, ops.Alloc) and op.buffer in new_tails.keys() - filled:
            start = used_numel(new_tails[op.buffer])
            numel = homes[op.buffer].padded_numel - start
            tail = Region(buffer=op.buffer, offset=start, numel=numel)
            after[index] = [ops.Fill(destination=tail, value=0.0, stream=op.stream)]
    return rewrite.insert(body, after=after)
