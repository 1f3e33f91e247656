"""Memory by torch's own counters: at rest to the byte, of one rank and of one of many."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import zeroir
from tests.gpu.support import (
    ALIGNMENT_BYTES,
    ROOT,
    SEED,
    allocated_bytes,
    example,
    example_batches,
    example_file,
    held_bytes,
    persistent,
    requested_bytes,
    result_bytes,
    rounded_bytes,
)
from tests.runtime.support import initial_flats, lowered
from tests.support.fake_world import join_fake_world
from tests.support.programs import mlp
from tools.peers import gpu_gpt
from zeroir.config import FloatName, make_options
from zeroir.cost.machine import MeasuredSegment, load_machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.frontend import load_model_file, trace
from zeroir.ir.buffers import Space
from zeroir.ir.program import EVALUATE, Program
from zeroir.memory.footprint import footprint
from zeroir.memory.states import MODEL_STATE_ROLES, model_state_bytes
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.memory.rank_memory import RankMemory

pytestmark = pytest.mark.gpu


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Rank 5 of a pretended world of the size that the test gives."""
    join_fake_world(5, request.param)
    yield request.param
    dist.destroy_process_group()


def warm_up(device: torch.device) -> None:
    """Let libraries allocate what they keep for the life of the process."""
    for precision in ("fp32", "bf16", "fp16"):
        engine = Engine(example(0, 1, precision), device=device)
        engine.initialise(example_file().model, SEED)
        engine.step(example_batches(1)[0])
        engine.close()


def require_states(program: Program) -> None:
    """The model states among the persistent buffers are what the program says."""
    states = [b for b in persistent(program) if b.role in MODEL_STATE_ROLES]
    assert sum(b.size_bytes for b in states) == sum(model_state_bytes(program).values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_example_holds_its_buffers_and_nothing_more(
    device: torch.device, stage: int, precision: str
) -> None:
    warm_up(device)
    program = example(stage, 1, precision)
    require_states(program)
    sizes = held_bytes(program)
    allocated, requested = allocated_bytes(), requested_bytes()
    engine = Engine(program, EngineSettings(seed=SEED), device=device)
    engine.initialise(example_file().model, SEED)
    for _ in range(2):
        held = [*sizes, *result_bytes(engine)]
        if max(sizes) <= 1 << 20:
            assert allocated_bytes() - allocated == rounded_bytes(held)
        assert requested_bytes() - requested == sum(held)
        engine.step(example_batches(1)[0])  # and after a step nothing else is left behind
    engine.close()


@pytest.mark.parametrize("world", [8, 64], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_of_many_holds_its_share_and_steps(
    device: torch.device, world: int, stage: int, precision: str
) -> None:
    warm_up(device)
    program = example(stage, world, precision)
    require_states(program)
    sizes = held_bytes(program)
    allocated, requested = allocated_bytes(), requested_bytes()
    engine = Engine(program, EngineSettings(backend=Backend.FAKE, seed=SEED), device=device)
    engine.initialise(example_file().model, SEED)
    for _ in range(3):
        held = [*sizes, *result_bytes(engine)]
        assert requested_bytes() - requested == sum(held)
        if max(sizes) <= 1 << 20:
            assert allocated_bytes() - allocated == rounded_bytes(held)
        engine.step(example_batches(1)[0])
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("world", [64], indirect=True)
def test_one_rank_of_64_holds_a_model_of_7_billion_parameters(
    device: torch.device, world: int
) -> None:
    """Stage 3 in bf16: 16 bytes a parameter over 64 ranks, and a step that gathers one unit after the other."""
    model_file = load_model_file(str(ROOT / "tests" / "support" / "models" / "big_gpt.py"))
    logical = trace(model_file, make_options({"world_size": world, "precision": "bf16"})).program
    program = lowered(logical, 3, world)
    states = sum(model_state_bytes(program).values())
    assert states * world == 16 * sum(flat.padded_numel for flat in program.flats)
    warm_up(device)
    before = requested_bytes()
    engine = Engine(program, EngineSettings(backend=Backend.FAKE), device=device)
    assert requested_bytes() == before  # the first step allocates
    for _ in range(2):
        result = engine.step(model_file.batch())
        assert result.mean_loss is not None
        held = [*held_bytes(program), *result_bytes(engine)]
        assert requested_bytes() - before == sum(held)
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_large_buffers_start_aligned_and_cost_no_more_than_the_allocators_rounding(
    device: torch.device, precision: str
) -> None:
    """Above 1 MiB an allocation may keep up to 1 MiB that is too little to be cut off."""
    program = lowered(mlp(precision=precision, dim=1024), 1, 1)
    sizes = held_bytes(program)
    gc.collect()
    torch.cuda.empty_cache()
    before = allocated_bytes()
    memory = RankMemory(program, 0, device)
    found = allocated_bytes() - before
    large = sum(1 for size in sizes if size > 1 << 20)
    assert large > 0
    assert 0 <= found - rounded_bytes(sizes) <= large * (1 << 20)
    for buffer in program.buffers:
        if buffer.space is not Space.DEVICE:
            continue
        if not buffer.is_persistent:
            memory.alloc(buffer.name)
        assert memory.buffer(buffer.name).data_ptr() % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_peak_of_a_step_is_the_footprint(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, stage: int, precision: FloatName
) -> None:
    """Within 3 %, of a GPT large enough that what libraries keep for the process's life is little beside it.

    Of kernels a profile has measured what they take, for no table knows what each card's libraries choose.
    """
    warm_up(device)
    monkeypatch.setenv(gpu_gpt.VARIABLE, "8x1024x16x1024x4")
    program = zeroir.compile(
        gpu_gpt.__file__, stage=stage, world_size=1, precision=precision
    ).program
    before = allocated_bytes()
    engine = Engine(program, device=device)
    batches = [
        tuple(part.to(device) for part in batch) for batch in gpu_gpt.random_batches(2, SEED)
    ]
    engine.initialise(gpu_gpt.model, SEED)
    inputs = sum(part.nbytes for batch in batches for part in batch)
    engine.step(batches[0])
    workspaces = engine.workspaces(lambda: engine.step(batches[0]))
    segments = {
        digest: MeasuredSegment(seconds=0, workspace_bytes=size, source="a step")
        for digest, size in workspaces.items()
    }
    machine = load_machine("dgx-h100").model_copy(update={"segments": segments})
    torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        engine.step(batch)
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before - inputs
    engine.close()
    # No step evaluates, so nothing was measured of the kernels of an evaluation.
    sections = tuple(section for section in program.sections if section.name != EVALUATE)
    training = replace(program, sections=sections)
    expected = footprint(with_measured_workspaces(training, machine)).total_bytes
    assert found == pytest.approx(expected, rel=0.03)


def test_a_step_takes_no_more_memory_while_the_device_is_behind(device: torch.device) -> None:
    """The host issues a whole step while the device sleeps: kernels take their own memory, buffers none."""
    blocks, dim = 12, 512
    logical = mlp(blocks=blocks, dim=dim, features=64, batch=8)
    program = lowered(logical, 3, 1)
    engine = Engine(program, device=device)
    engine.initialise_flats(initial_flats(logical))
    batch = {"x": torch.randn(8, 64, device=device)}
    engine.step(batch)
    at_rest = requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    engine.step(batch)
    grown = torch.cuda.memory_stats()["requested_bytes.all.peak"] - at_rest
    assert grown < max(flat.padded_numel for flat in program.flats) * 4
    engine.close()
