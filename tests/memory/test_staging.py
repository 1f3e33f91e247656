"""The bytes of staging are those that the block of temporary buffers has room for."""

from __future__ import annotations

import pytest

from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS, PAGED
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.program import Program
from zeroir.memory.placement import placements_with_bound, rounded
from zeroir.memory.staging import staging_bytes
from zeroir.passes.memory.plan_memory import PlanMemory


def program_with(offload: str) -> Program:
    logical = mlp(blocks=5, batch=256, clip=1.0)
    return applied(logical, (*for_stage(3, 3), *OFFLOADS[offload], PlanMemory()))


def live_in_text_order(program: Program, space: Space) -> int:
    """The most bytes of buffers of the roles of staging that are live at once if ops run in the order of the text."""
    most = 0
    for section in program.sections:
        live: dict[str, int] = {}
        for op in section.body:
            if isinstance(op, ops.Memory):
                buffer = program.buffer_by_name[op.buffer]
                if buffer.space is not space or buffer.role not in (Role.STAGING, Role.PAGE):
                    continue
                is_alloc = isinstance(op, ops.Alloc)
                live[op.buffer] = rounded(buffer.size_bytes, space) if is_alloc else 0
                most = max(most, sum(live.values()))
    return most


@pytest.mark.parametrize("offload", OFFLOADS)
def test_staging_is_what_the_block_of_its_space_has_room_for(offload: str) -> None:
    program = program_with(offload)
    staging, blocks = staging_bytes(program), placements_with_bound(program)
    temporary = {buffer.role for buffer in program.buffers if not buffer.is_persistent}
    assert (Role.STAGING in temporary or Role.PAGE in temporary) == bool(staging)
    for space, size in staging.items():
        assert live_in_text_order(program, space) <= size <= blocks[space].live_bytes
    host = {
        buffer.role
        for buffer in program.buffers
        if buffer.space is Space.HOST and not buffer.is_persistent
    }
    if host == {Role.STAGING}:
        # Nothing else is in the block, so that its lower bound is the staging, to the byte.
        assert staging[Space.HOST] == blocks[Space.HOST].live_bytes


def test_the_slots_of_pages_are_staging() -> None:
    assert staging_bytes(program_with("pages")) == {Space.DEVICE: PAGED.device_bytes}
