"""What the runtime holds at rest, counted by torch's own allocator events, is what the program says."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.allocations import left_bytes
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
from zeroir.runtime.execution.host_profile import measure_host
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.memory.allocations import allocations, by_range, peak_bytes
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
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
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
    "stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))]
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


# ---- Freed memory is the process's own during training, and the kernel's before it; judged by the kernel's page faults


PROGRAM = """
import json, resource, sys
import torch
from zeroir.runtime.memory import malloc

torch.set_num_threads(1)
SIZES = (8 << 20, 3 << 20, 512 << 10)

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [torch.empty(size, dtype=torch.uint8).fill_(1) for size in SIZES]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

accepted = [malloc.return_freed_memory()]
returned = faults(10)
accepted.append(malloc.keep_freed_memory())
faults(8)
print(json.dumps([accepted, returned, faults(10), sum(SIZES)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_training_reuses_pages_and_what_comes_before_gives_them_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    accepted, returned, kept, size_bytes = json.loads(done.stdout)
    assert accepted == [True, True]
    # A fault may bring in a huge page of 2 MiB at most.
    assert returned >= 10 * size_bytes / (2 << 20)
    assert kept < returned / 10


# ---- Torch's allocator events, as the only module that looks into its profiler tells them


def test_events_are_told_by_the_ranges_around_them() -> None:
    kept: list[torch.Tensor] = []

    def action() -> None:
        with record_function("first"):
            kept.append(torch.empty(100))
            torch.empty(50)
        with record_function("second"):
            kept.clear()

    events = by_range(allocations(action), ("first", "second"))
    assert set(events) == {"first", "second"}, torch.__version__
    assert (peak_bytes(events["first"]), left_bytes(events["first"])) == (600, 400)
    assert (peak_bytes(events["second"]), left_bytes(events["second"])) == (0, -400)


def test_only_what_the_profiler_says_of_itself_is_kept_from_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kept = [torch.empty(1000)]

    def action() -> None:
        kept.clear()  # which the profiler has to say something about
        os.write(2, b"something else\n")

    allocations(action)
    assert capfd.readouterr().err == "something else\n"


# ---- The rates of the host at hand; how fast it is, no test says


@pytest.mark.slow
def test_the_host_at_hand_is_measured() -> None:
    meetings: list[None] = []
    rates = measure_host(torch.device("cpu"), lambda: meetings.append(None))
    assert len(meetings) > 0
    assert all(rate > 0 for rate in asdict(rates).values())
    # Both directions at once cannot copy more than each of them alone, and noise is below 10 times.
    one_way = rates.to_device_bytes_per_s + rates.to_host_bytes_per_s
    assert rates.both_bytes_per_s < 10 * one_way
