"""Activations that wait in pinned host memory, on a CUDA device: the same bits, graphs, and the bytes of the plan."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.gpu.support import allocated_bytes, held_bytes, losses_of, rounded_bytes
from tests.runtime.support import initial_flats
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, Program
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda_graphs import WARM_UP
from zeroir.runtime.memory.rank_memory import RankMemory

pytestmark = pytest.mark.gpu

STEPS, MICRO_STEPS = WARM_UP + 4, 2


@cache
def logical() -> Program:
    return mlp(blocks=5, dim=256, features=64, batch=512, precision="fp16", micro_steps=MICRO_STEPS)


def scheduled(stage: int, *, is_offloaded: bool) -> Program:
    offload = (OffloadActivations(smallest=0),) if is_offloaded else ()
    return applied(logical(), (*for_stage(stage, 1), *offload, PlanMemory()))


def batches(device: torch.device) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [{"x": torch.randn(512, 64, generator=generator).to(device)} for _ in range(MICRO_STEPS)]
        for _ in range(STEPS)
    ]


def trained(
    device: torch.device, stage: int, *, is_offloaded: bool, cuda_graphs: bool
) -> tuple[Tensor, Mapping[tuple[str, str], Tensor]]:
    """Losses of every step and the state after the last one; as graphs where ``cuda_graphs``."""
    program = scheduled(stage, is_offloaded=is_offloaded)
    assert any(isinstance(op, ops.ToHost) for op in program.step_ops()) is is_offloaded
    engine = Engine(program, EngineSettings(cuda_graphs=cuda_graphs), device=device)
    engine.initialise_flats(initial_flats(logical()))
    losses = losses_of(engine, batches(device))
    state = dict(engine.full_state())
    if cuda_graphs:
        assert engine.rank_program.opened.graphs is not None
        assert {MICRO_STEP, LAST_MICRO_STEP} <= engine.rank_program.opened.graphs.captured
    engine.close()
    return losses, state


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_no_bit_changes(device: torch.device, stage: int, cuda_graphs: bool) -> None:
    losses, state = trained(device, stage, is_offloaded=False, cuda_graphs=False)
    again, state_again = trained(device, stage, is_offloaded=True, cuda_graphs=cuda_graphs)
    assert torch.equal(losses, again)
    assert all(torch.equal(state[key], state_again[key]) for key in state)


def test_the_device_is_relieved_of_what_waits_in_pinned_memory(device: torch.device) -> None:
    found: list[int] = []
    for is_offloaded in (False, True):
        program = scheduled(3, is_offloaded=is_offloaded)
        gc.collect()
        torch.cuda.empty_cache()
        before = allocated_bytes()
        memory = RankMemory(program, 0, device)
        found.append(allocated_bytes() - before)
        large = sum(1 for size in held_bytes(program) if size > 1 << 20)
        assert 0 <= found[-1] - rounded_bytes(held_bytes(program)) <= large * (1 << 20)
        for buffer in program.buffers:
            if buffer.space is Space.HOST and not buffer.is_persistent:
                memory.alloc(buffer.name)
                assert memory.buffer(buffer.name).is_pinned()
        del memory
    assert found[1] < found[0]
