"""What the runtime holds at rest, counted by torch's own allocator events, is what the program says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.buffers import Role, Space
from zeroir.memory.footprint import footprint
from zeroir.memory.placement import places_to_run
from zeroir.memory.states import MODEL_STATE_ROLES, model_state_bytes
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.memory.rank_memory import RankMemory


def allocated_bytes(action: Callable[[], object]) -> int:
    """Bytes that the action leaves allocated on the CPU, by torch's allocator events."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = action()
        gc.collect()
    del kept
    return sum(
        event.self_cpu_memory_usage
        for event in profiler.events()
        if event.name == "[memory]" or event.self_cpu_memory_usage
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_at_rest_a_rank_holds_its_persistent_buffers_and_a_place_for_temporary_ones(
    stage: int, precision: str
) -> None:
    program = lowered(mlp(precision=precision, dim=64), stage, 4)
    persistent = [buffer for buffer in program.buffers if buffer.is_persistent]
    states = [buffer for buffer in persistent if buffer.role in MODEL_STATE_ROLES]
    temporary = sum(placement.size_bytes for placement in places_to_run(program).values())
    expected = sum(buffer.size_bytes for buffer in persistent) + temporary
    assert sum(model_state_bytes(program).values()) == sum(b.size_bytes for b in states)
    found = allocated_bytes(lambda: RankMemory(program, 1, torch.device("cpu")))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_on_the_host_are_counted_there(stage: int) -> None:
    """Without the host's part, torch allocates for the device what its footprint says, less than without offload."""
    logical = mlp(precision="bf16", dim=64, blocks=4)
    program = applied(logical, (*for_stage(stage, 4), OffloadParameters()))
    placed = places_to_run(program)
    device, host = (
        sum(b.size_bytes for b in program.buffers if b.is_persistent and b.space is space)
        + (placed[space].size_bytes if space in placed else 0)
        for space in (Space.DEVICE, Space.HOST)
    )
    by_plan = [footprint(program, space=s, place=places_to_run) for s in (Space.DEVICE, Space.HOST)]
    assert [f.resting_bytes + f.arena_bytes for f in by_plan] == [device, host]
    cpu = torch.device("cpu")
    assert allocated_bytes(lambda: RankMemory(program, 1, cpu)) == device + host
    plain = lowered(logical, stage, 4)
    assert device < allocated_bytes(lambda: RankMemory(plain, 1, cpu))


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_steps_leave_nothing_behind(stage: int, precision: str) -> None:
    """In lockstep, whose one thread the profiler sees whole."""
    logical = mlp(precision=precision, dim=64)
    program = lowered(logical, stage, 2)
    initial, batches = initial_flats(logical), random_batches(1, 2)

    def train() -> Lockstep:
        lockstep = Lockstep(program)
        lockstep.initialise_flats(initial)
        lockstep.step(batches[0])
        return lockstep

    temporary = sum(placement.size_bytes for placement in places_to_run(program).values())
    expected = 2 * (sum(b.size_bytes for b in program.buffers if b.is_persistent) + temporary)
    assert allocated_bytes(train) == expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_paged_states_take_the_device_memory_that_was_asked_for(stage: int) -> None:
    """Without the pages that rest on the host, torch allocates that much less than for the program without pages."""
    logical = mlp(precision="bf16", dim=64, blocks=4, clip=1.0)
    base = for_stage(stage, 4)
    before = applied(logical, base)
    states = [buffer for buffer in before.buffers if buffer.role is Role.STATE]
    device_bytes = sum(buffer.size_bytes for buffer in states) // 2
    after = applied(logical, (*base, PageOptimizer(device_bytes=device_bytes, page_bytes=4096)))
    found = []
    for program in (before, after):
        on_host = sum(
            buffer.size_bytes
            for buffer in program.buffers
            if buffer.is_persistent and buffer.space is Space.HOST
        )
        arena = places_to_run(program)[Space.DEVICE].size_bytes
        memory = partial(RankMemory, program, 1, torch.device("cpu"))
        found.append(allocated_bytes(memory) - on_host - arena)
    slot_bytes = sum(buffer.size_bytes for buffer in after.buffers if buffer.role is Role.PAGE)
    taken = found[1] + slot_bytes - (found[0] - 2 * device_bytes)
    assert device_bytes - 2048 < taken <= device_bytes


def test_a_part_of_a_buffer_on_disk_is_cleared_also_where_it_is_one_element() -> None:
    program = applied(mlp(), (*for_stage(3, 2), *OFFLOADS["everything to disk"]))
    memory = RankMemory(program, 0, torch.device("cpu"))
    name = next(buffer.name for buffer in program.buffers if memory.is_on_disk(buffer.name))
    values = torch.arange(1.0, 9.0)
    for stop in (4, 6):
        memory.write(name, 0, values)
        memory.clear_elements(name, 3, stop)
        expected = values.index_fill(0, torch.arange(3, stop), 0)
        assert memory.read(name, 0, 8).tolist() == expected.tolist()
