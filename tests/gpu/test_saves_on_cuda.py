"""Saves beside training on a GPU: the bits of the boundary, with and without graphs, and no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.support import SEED, torch_stream
from tests.runtime.support import initial_flats, random_batches
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.buffers import Role
from zeroir.ir.mesh import COPY_OUT
from zeroir.ir.program import Program
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.cuda_graphs import WARM_UP
from zeroir.torch_ops.batches import Batch

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 2_000_000_000
"""About a second, in which a step would be long over."""


def opened(program: Program, device: torch.device, *, cuda_graphs: bool) -> Engine:
    engine = Engine(program, EngineSettings(seed=SEED, cuda_graphs=cuda_graphs), device=device)
    engine.initialise_flats(initial_flats(program))
    return engine


def batches_of(device: torch.device, steps: int) -> list[Batch]:
    batches: list[Batch] = []
    for ((batch,),) in random_batches(steps, 1, 1):
        assert isinstance(batch, dict)
        batches.append({"x": batch["x"].to(device)})
    return batches


def states(engine: Engine) -> dict[str, Tensor]:
    roles = (Role.MASTER, Role.STATE)
    return {b.name: engine.buffer(b.name).cpu() for b in engine.program.buffers if b.role in roles}


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("overlap_update", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_late_copies_have_the_bits_of_the_boundary(
    device: torch.device, stage: int, overlap_update: bool, cuda_graphs: bool
) -> None:
    passes = for_stage(stage, 1, overlap_update=overlap_update)
    program = applied(mlp(precision="bf16"), (*passes, SaveState()))
    engine = opened(program, device, cuda_graphs=cuda_graphs)
    streams = engine.rank_program.executor._streams
    assert isinstance(streams, CudaStreams)
    batches = batches_of(device, WARM_UP + 6)
    for batch in batches[: WARM_UP + 2]:
        engine.step(batch)
    for batch in batches[WARM_UP + 2 :]:
        expected = states(engine)
        with torch.cuda.stream(torch_stream(streams, COPY_OUT)):
            torch.cuda._sleep(SLEEP_CYCLES // 4)  # type: ignore[no-untyped-call]
        (saved,) = engine.rank_program.executor.save_state()
        engine.step(batch)
        saved.wait()
        for name, values in expected.items():
            copy = saved.tensors[name]
            assert copy.tensor.is_pinned()
            assert torch.equal(copy.tensor, values[copy.start : copy.stop]), name
        saved.release()
    engine.close()


def test_the_host_issues_the_next_step_while_copies_are_under_way(device: torch.device) -> None:
    program = applied(mlp(), (*for_stage(2, 1), SaveState()))
    engine = opened(program, device, cuda_graphs=False)
    streams = engine.rank_program.executor._streams
    assert isinstance(streams, CudaStreams)
    first, second, third = batches_of(device, 3)
    engine.step(first)
    engine.rank_program.executor.save_state()[0].release()  # allocates the host's memory
    engine.step(second)
    torch.cuda.synchronize(device)
    expected = states(engine)
    with torch.cuda.stream(torch_stream(streams, COPY_OUT)):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    (saved,) = engine.rank_program.executor.save_state()
    engine.rank_program.executor.step([[third]])
    assert not torch_stream(streams, COPY_OUT).query()
    saved.wait()  # for the copies alone: the step, which waits for them, may still be under way
    for name, values in expected.items():
        copy = saved.tensors[name]
        assert torch.equal(copy.tensor, values[copy.start : copy.stop]), name
    engine.close()
