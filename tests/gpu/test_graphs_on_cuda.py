"""Sections as CUDA graphs compute what the same sections compute op by op, to the bit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.support import (
    SEED,
    example,
    example_batches,
    example_file,
    held_bytes,
    losses_of,
    reserved_and_allocated,
)
from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.errors import GraphWarning
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda_graphs import WARM_UP
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.torch_ops.batches import Batch

pytestmark = pytest.mark.gpu

STEPS = WARM_UP + 5


def opened(
    program: Program,
    device: torch.device,
    *,
    cuda_graphs: bool,
    backend: Backend | None = None,
    kernels: KernelBackend = KernelBackend.EAGER,
) -> Engine:
    engine = Engine(
        program,
        EngineSettings(backend=backend, kernels=kernels, seed=SEED, cuda_graphs=cuda_graphs),
        device=device,
    )
    engine.initialise_flats(initial_flats(program))
    return engine


def batches_of(device: torch.device, steps: int, micro_steps: int = 1) -> list[list[Batch]]:
    found: list[list[Batch]] = []
    for (micro_batches,) in random_batches(steps, 1, micro_steps):
        assert all(isinstance(batch, dict) for batch in micro_batches)
        found.append(
            [{"x": batch["x"].to(device)} for batch in micro_batches if isinstance(batch, dict)]
        )
    return found


def run(engine: Engine, batches: list[list[Batch]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and everything that the steps left behind."""
    losses = [engine.step(list(micro_batches)).loss for micro_batches in batches]
    state = {f"{flat}/{name}": value.cpu() for (flat, name), value in engine.full_state().items()}
    return losses, state


def captured(engine: Engine) -> frozenset[str]:
    assert engine.rank_program.opened.graphs is not None
    return engine.rank_program.opened.graphs.captured


def require_equal(
    found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for key, value in found[1].items():
        assert torch.equal(value, expected[1][key]), key


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_graphs_change_no_bit(
    device: torch.device, stage: int, precision: str, micro_steps: int
) -> None:
    program = lowered(mlp(precision=precision, clip=0.5, micro_steps=micro_steps), stage, 1)
    batches = batches_of(device, STEPS, micro_steps)
    expected = run(opened(program, device, cuda_graphs=False), batches)
    engine = opened(program, device, cuda_graphs=True)
    require_equal(run(engine, batches), expected)
    assert captured(engine) == {section.name for section in program.sections}
    engine.close()


@pytest.mark.usefixtures("_one_nccl_rank")
@pytest.mark.parametrize("stage", range(4))
def test_collectives_of_nccl_are_captured(device: torch.device, stage: int) -> None:
    program = lowered(mlp(precision="bf16", clip=0.5), stage, 1)
    batches = batches_of(device, STEPS)
    expected = run(opened(program, device, cuda_graphs=False), batches)
    engine = opened(program, device, cuda_graphs=True, backend=Backend.NCCL)
    require_equal(run(engine, batches), expected)
    assert captured(engine) == {section.name for section in program.sections}
    engine.close()


def test_a_changed_learning_rate_reaches_a_graph(device: torch.device) -> None:
    program = lowered(mlp(), 3, 1)
    batches = batches_of(device, STEPS)
    found = []
    for cuda_graphs in (False, True):
        engine = opened(program, device, cuda_graphs=cuda_graphs)
        run(engine, batches[:-2])
        before = captured(engine) if cuda_graphs else None
        engine.buffer("lr").fill_(0.123)
        found.append(run(engine, batches[-2:]))
        assert before is None or captured(engine) == before
        engine.close()
    require_equal(found[1], found[0])


def test_changed_hyper_parameters_are_captured_anew(device: torch.device) -> None:
    program = lowered(mlp(), 3, 1)
    batches = batches_of(device, STEPS)
    found = []
    for cuda_graphs in (False, True):
        engine = opened(program, device, cuda_graphs=cuda_graphs)
        run(engine, batches[:-2])
        engine.buffer("hyper")[3] = 0.5  # weight decay
        found.append(run(engine, batches[-2:]))
        engine.close()
    require_equal(found[1], found[0])


def test_an_overflow_in_a_graph_skips_the_step(device: torch.device) -> None:
    program = lowered(mlp(precision="fp16"), 3, 1)
    engine = opened(program, device, cuda_graphs=True)
    run(engine, batches_of(device, WARM_UP + 1))
    before, scale = engine.full_parameters(), float(engine.buffer("loss_scale")[0])
    for _ in range(2):  # hysteresis
        result = engine.step({"x": torch.full((4, 6), 1e4, device=device)})
        assert result.is_skipped
    for name, value in engine.full_parameters().items():
        assert torch.equal(value, before[name])
    assert float(engine.buffer("loss_scale")[0]) == scale / 2
    assert not engine.step(batches_of(device, 1)[0]).is_skipped
    engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_the_example_runs_as_graphs(device: torch.device, stage: int) -> None:
    """Attention, embeddings and norms; sums by atomic additions may differ in the last bits."""
    program = example(stage, 1, "bf16")
    losses = []
    for cuda_graphs in (False, True):
        engine = Engine(program, EngineSettings(seed=SEED, cuda_graphs=cuda_graphs), device=device)
        engine.initialise(example_file().model, SEED)
        losses.append(losses_of(engine, example_batches()))
        if cuda_graphs:
            steps = [program.section_by_name[name] for name in (LAST_MICRO_STEP, UPDATE)]
            assert captured(engine) == {section.name for section in steps if section.body}
        engine.close()
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-8, atol=0.0)


@pytest.mark.slow
def test_compiled_kernels_run_as_graphs(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    program = lowered(mlp(precision="bf16"), 3, 1)
    batches = batches_of(device, STEPS)
    inductor = KernelBackend.INDUCTOR
    expected = run(opened(program, device, cuda_graphs=False, kernels=inductor), batches)
    engine = opened(program, device, cuda_graphs=True, kernels=inductor)
    require_equal(run(engine, batches), expected)
    assert captured(engine) == {section.name for section in program.sections}
    engine.close()


def test_a_capture_that_fails_leaves_the_device_as_it_was(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read on the host in the middle of a section: nothing of the capture is left, and training goes on."""
    program = lowered(mlp(clip=0.5), 3, 1)
    batches = batches_of(device, STEPS)
    expected = run(opened(program, device, cuda_graphs=False), batches)
    from zeroir.runtime.execution import numerics

    plain = numerics.sum_of_squares

    def reading(sources: list[Tensor], destination: Tensor, *, is_added: bool = False) -> None:
        plain(sources, destination, is_added=is_added)
        destination.item()

    monkeypatch.setattr(numerics, "sum_of_squares", reading)
    engine = opened(program, device, cuda_graphs=True)
    with pytest.warns(GraphWarning, match="update, because capturing it failed"):
        found = run(engine, batches)
    require_equal(found, expected)
    assert captured(engine) == {"last_micro_step"}
    engine.close()
    torch.cuda.empty_cache()  # torch refuses while its allocator takes a capture to be going on


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_closing_gives_everything_back(device: torch.device, cuda_graphs: bool) -> None:
    program = lowered(mlp(dim=1024), 3, 1)
    found = []
    for _ in range(2):
        engine = opened(program, device, cuda_graphs=cuda_graphs)
        run(engine, batches_of(device, STEPS))
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        found.append(reserved_and_allocated())
    assert found[0] == found[1]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_little_is_reserved_that_is_not_allocated(device: torch.device, cuda_graphs: bool) -> None:
    """One block for temporary buffers, and what kernels need beside it.

    The allocator takes memory from CUDA in multiples of 2 MiB, so each large buffer may leave that much unused.
    """
    logical = mlp(blocks=24, dim=2048, features=2048, batch=64, precision="bf16")
    program = lowered(logical, 3, 1)
    large = sum(1 for size in held_bytes(program) if size > 1 << 20)
    engine = opened(program, device, cuda_graphs=cuda_graphs)
    batch = {"x": torch.randn(64, 2048, device=device)}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        engine.step(batch)
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    engine.close()
    assert reserved <= 1.02 * allocated + large * (2 << 20)


@pytest.mark.parametrize(
    "name", ["_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool"]
)
def test_torch_still_has_what_captures_are_cleaned_up_with(name: str) -> None:
    """Torch has had these private functions from 2.11 to 2.13; see ``runtime/execution/cuda.py`` where one is gone."""
    assert hasattr(torch._C, name), torch.__version__


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_a_schedule_drives_a_program_with_and_without_graphs(
    device: torch.device, optimizer: str
) -> None:
    """The learning rate changes in every step; betas and momentum change at first and then stay."""
    program = lowered(mlp(optimizer=optimizer), 3, 1)
    batches = batches_of(device, 2 * STEPS)
    found = []
    for cuda_graphs in (False, True):
        engine = opened(program, device, cuda_graphs=cuda_graphs)
        (group,) = engine.optimizer.param_groups
        losses: list[float] = []
        for step, batch in enumerate(batches):
            group["lr"] = 0.01 / (1 + step)
            if step < STEPS:
                change = 0.8 + 0.01 * step
                group.update(
                    {"betas": (change, 0.99)} if "betas" in group else {"momentum": change}
                )
            losses += run(engine, [batch])[0]
        found.append((losses, engine.full_parameters()))
        assert not cuda_graphs or captured(engine)
        engine.close()
    require_equal(found[1], found[0])
