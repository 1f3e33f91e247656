"""The memory of the device and that of the host are counted apart, although on a CPU they are one.

Torch's allocator says which bytes a rank takes, within the ranges that name the space; the storages of the buffers say
the same without those ranges. Both are what the program's footprint says of that space, and a step takes no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from tests.memory.judge import judge
from tests.runtime.support import initial_flats, random_batches
from tests.support.allocations import left_bytes
from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.buffers import Role, Space, whole
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.memory.states import snapshot_bytes
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.disk.scratch_file import PAGE_BYTES
from zeroir.runtime.memory.allocations import AllocatorEvent, allocations, by_range
from zeroir.runtime.memory.rank_memory import RankMemory, allocation_range
from zeroir.workspace.op_scratch import scratch_space
from zeroir.workspace.segments import declared

CPU: Final = torch.device("cpu")
RANKS: Final = 3
IN_MEMORY: Final = (Space.DEVICE, Space.HOST)
NOTHING: Final = "nothing"
EACH_OFFLOAD: Final = pytest.mark.parametrize("offload", [NOTHING, *OFFLOADS])
QUICK: Final = frozenset({"activations", "everything to disk", "pages"})
EACH_STAGE: Final = pytest.mark.parametrize("stage", range(4))


def planned(stage: int, offload: str) -> Program:
    logical = mlp(blocks=5, batch=256, precision="fp16", clip=1.0)
    passes = (*for_stage(stage, RANKS), *OFFLOADS.get(offload, ()), SaveState(), PlanMemory())
    return declared(applied(logical, passes))


def held_bytes(program: Program, space: Space) -> int:
    """The bytes that a rank has in a space before its first save, as the program says.

    Where buffers are on disk, each allocation on the host has a page more, so that it can begin at a page.
    """
    planned_bytes = footprint(program, space=space)
    held = planned_bytes.resting_bytes + planned_bytes.arena_bytes
    if space is Space.HOST:
        held -= snapshot_bytes(program)
        if any(buffer.space is Space.DISK for buffer in program.buffers):
            resting = [b for b in program.buffers if b.is_persistent and b.space is Space.HOST]
            pages = sum(b.role is not Role.SNAPSHOT for b in resting) + 1
            held += pages * PAGE_BYTES
    return held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        ((number + turn) % 4, offload)
        for number, offload in enumerate((NOTHING, *OFFLOADS))
        for turn in (0, 2)
    ],
)
def test_torchs_allocator_counts_what_the_footprint_of_each_space_says(
    stage: int, offload: str
) -> None:
    program = planned(stage, offload)
    events = allocations(lambda: RankMemory(program, 1, CPU))
    names = {space: allocation_range(space) for space in IN_MEMORY}
    found = by_range(events, names.values())
    for space, name in names.items():
        assert left_bytes(found.get(name, ())) == held_bytes(program, space), space
    assert left_bytes(found.get("", ())) == 0, "nothing is allocated for no space"


@pytest.mark.slow
@EACH_OFFLOAD
def test_the_storages_of_the_buffers_of_each_space_are_as_large(offload: str) -> None:
    program = planned(3, offload)
    memory = RankMemory(program, 1, CPU)
    storages: dict[Space, dict[int, int]] = {space: {} for space in IN_MEMORY}
    for buffer in program.buffers:
        if buffer.role is Role.SNAPSHOT or buffer.space not in IN_MEMORY:
            continue
        storage = memory.region(whole(buffer)).untyped_storage()
        storages[buffer.space][storage.data_ptr()] = storage.nbytes()
    assert not storages[Space.DEVICE].keys() & storages[Space.HOST].keys()
    for space in IN_MEMORY:
        assert sum(storages[space].values()) == held_bytes(program, space), space


@pytest.mark.parametrize(
    ("offload", "stage"),
    [
        *((offload, 3) for offload in (NOTHING, *sorted(QUICK))),
        *(
            pytest.param(offload, stage, marks=pytest.mark.slow)
            for offload, stage in [
                *((offload, 0) for offload in (NOTHING, *sorted(QUICK))),
                *((offload, 3) for offload in sorted(OFFLOADS.keys() - QUICK)),
            ]
        ),
    ],
)
def test_a_step_takes_no_more_in_either_space_than_its_scratch(stage: int, offload: str) -> None:
    program = planned(stage, offload)
    logical = mlp(blocks=5, batch=256, precision="fp16", clip=1.0)
    (batches,) = random_batches(1, 1, shape=(256, 6))
    judged = judge(program, batches[0], initial=initial_flats(logical))
    assert not judged.wrong
    for space in IN_MEMORY:
        own = [v for v in judged.verdicts if scratch_space(program, v.op) is space]
        most = max((v.peak_bytes for v in own), default=0)
        assert most <= footprint(program, space=space).scratch_bytes, space


@pytest.mark.slow
@EACH_STAGE
def test_the_device_is_relieved_of_what_the_host_takes(stage: int) -> None:
    """The bytes by which torch's allocator is asked for less on the device are those that the plans differ by."""
    programs = [planned(stage, offload) for offload in (NOTHING, "activations")]
    device, host = (
        [left_bytes(_of(program, space)) for program in programs] for space in IN_MEMORY
    )
    fewer = footprint(programs[0]).arena_bytes - footprint(programs[1]).arena_bytes
    assert device[0] - device[1] == fewer > 0
    activations = [b for b in programs[1].buffers if b.name.endswith(".host")]
    assert host[1] - host[0] == footprint(programs[1], space=Space.HOST).arena_bytes
    assert host[1] - host[0] >= sum(b.size_bytes for b in activations) > 0


def _of(program: Program, space: Space) -> Sequence[AllocatorEvent]:
    name = allocation_range(space)
    return by_range(allocations(lambda: RankMemory(program, 1, CPU)), [name]).get(name, [])
