"""Which flat a buffer belongs to, found by what the ops say and not by its name; regions of shards."""

from __future__ import annotations

from dataclasses import replace

from tests.support.edits import with_body, with_buffers
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.dtypes import DType
from zeroir.ir.program import UPDATE, Program
from zeroir.passes.common import rewrite


def with_casts(program: Program, pairs: list[tuple[str, Buffer]]) -> Program:
    """The program with casts from its buffers into new ones at the end of the update."""
    update = program.section_by_name[UPDATE]
    casts = tuple(
        ops.Cast(
            source=whole(program.buffer_by_name[source]), destination=whole(to), stream="compute"
        )
        for source, to in pairs
    )
    added = {to.name: to for _, to in pairs}
    return with_body(with_buffers(program, *added.values()), UPDATE, (*update.body, *casts))


def temporary(name: str, numel: int) -> Buffer:
    return Buffer(name=name, dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.STAGING)


def test_what_is_cast_from_a_flat_is_in_its_coordinates() -> None:
    program = mlp(blocks=2, precision="bf16")
    for flat in program.flats:
        mine = temporary("x", flat.padded_numel)
        made = with_casts(program, [(f"{flat.name}.grad", mine)])
        assert rewrite.flat_of_buffer(made)["x"] == flat


def test_a_slot_that_flats_use_in_turn_has_no_home() -> None:
    program = mlp(blocks=2)
    first, second = program.flats[:2]
    assert first.padded_numel == second.padded_numel
    slot = temporary("slot", first.padded_numel)
    made = with_casts(program, [(f"{flat.name}.grad", slot) for flat in (first, second)])
    homes = rewrite.flat_of_buffer(made)
    assert "slot" not in homes
    assert homes[f"{first.name}.grad"] == first
    assert homes[f"{second.name}.grad"] == second


def test_a_part_of_a_slice_is_a_part_of_the_shard() -> None:
    region = Region(buffer="f.grad", offset=0, numel=1024, shard="dp", part=(64, 128))
    assert rewrite.as_shard(region, 4) == Region(buffer="f.grad", offset=64, numel=64)
    assert rewrite.as_shard(replace(region, part=None), 4) == Region(
        buffer="f.grad", offset=0, numel=256
    )
