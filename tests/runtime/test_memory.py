"""What the runtime holds at rest, counted by torch's own allocator events, is what the program says."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.memory.placement import places_to_run
from zeroir.memory.states import MODEL_STATE_ROLES, model_state_bytes
from zeroir.runtime.lockstep import Lockstep
from zeroir.runtime.rank_memory import RankMemory


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
