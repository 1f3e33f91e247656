"""The moving average of the weights against torch's, and the same bits at every stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.runtime.support import (
    begun,
    initial_flats,
    lowered,
    parameters_of,
    random_batches,
    require_same,
)
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.runtime.execution import numerics
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.workspace import op_scratch

AVERAGED_MODEL: Callable[..., AveragedModel] = AveragedModel
EMA_AVG_FN: Callable[[float], Callable[[Tensor, Tensor, int], Tensor]] = get_ema_avg_fn
DECAY = 0.9
STEPS = 6


class Weights(nn.Module):
    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))

    def set(self, parameters: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in parameters.items():
                self.get_parameter(name.replace(".", "_")).copy_(value)


def train(program: Program, logical: Program, seed: int = 0) -> Lockstep:
    """Train, and require after every step that the averages are those of torch."""
    lockstep = begun(Lockstep(program, schedule_seed=seed))
    model = Weights(lockstep.full_parameters())
    averaged = AVERAGED_MODEL(model, avg_fn=EMA_AVG_FN(DECAY))
    averaged.update_parameters(model)  # The first call copies: the average begins with the weights.
    micro_steps = int(logical.options.texts["micro_steps"])
    for batches in random_batches(STEPS, program.mesh.world_size, micro_steps):
        lockstep.step(batches)
        model.set(lockstep.full_parameters())
        averaged.update_parameters(model)
        for name, value in lockstep.full_parameters(ema=True).items():
            expected = averaged.module.get_parameter(name.replace(".", "_"))
            assert torch.equal(value, expected), name
    return lockstep


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_equal_those_of_torch_at_every_stage(world_size: int, precision: str) -> None:
    logical = mlp(precision=precision, ema=DECAY)
    first = train(lowered(logical, 0, world_size), logical).full_state()
    for stage in (1, 2, 3):
        state = train(lowered(logical, stage, world_size), logical, seed=stage).full_state()
        assert {quantity for _, quantity in state} >= {"ema"}
        require_same(state, first)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_averages_of_an_overlapped_update_and_of_a_mesh_have_the_same_bits(stage: int) -> None:
    logical = mlp(ema=DECAY, micro_steps=2 if stage == 2 else 1)
    passes = tuple(for_stage(stage, 4, overlap_update=True))
    program = proved(logical, passes)
    last = program.section_by_name[LAST_MICRO_STEP].body
    assert any(isinstance(op, ops.Average) for op in last)
    overlapped = train(program, logical).full_state()
    plain = train(lowered(logical, stage, 4), logical).full_state()
    require_same(overlapped, plain)
    train(applied(logical, tuple(for_stage(stage, 4, replicas=2, overlap_update=True))), logical)


@pytest.mark.parametrize("stage", range(4))
def test_a_skipped_step_leaves_the_averages(stage: int) -> None:
    logical = mlp(precision="fp16", ema=DECAY)
    lockstep = begun(Lockstep(lowered(logical, stage, 3)))
    first, second = random_batches(2, 3)
    lockstep.step(first)
    before = {key: value.clone() for key, value in lockstep.full_state().items()}
    second[1] = [{"x": torch.full((4, 6), 3e4)}]
    lockstep.step(second)
    require_same(lockstep.full_state(), before)


def test_a_skipped_average_keeps_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative zeros too; and chunks do not show."""
    monkeypatch.setattr(numerics, "AVERAGED_CHUNK_NUMEL", 64)
    param, mean = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    mean[:3] = -0.0
    kept = mean.clone()
    numerics.average(param, kept, DECAY, torch.ones(1))
    assert torch.equal(kept.view(torch.int32), mean.view(torch.int32))
    expected = DECAY * mean + (1 - DECAY) * param
    for skip in (None, torch.zeros(1)):
        moved = mean.clone()
        numerics.average(param, moved, DECAY, skip)
        assert torch.equal(moved, expected)


def test_the_parameters_begin_as_the_averages() -> None:
    logical = mlp(precision="bf16", ema=DECAY)
    lockstep = Lockstep(lowered(logical, 3, 3))
    initial = initial_flats(logical)
    lockstep.initialise_flats(initial)
    state = lockstep.full_state()
    for flat in logical.flats:
        wanted = initial[f"{flat.name}.param"]
        found = state[flat.name, "ema"]
        assert torch.equal(found, wanted[: found.numel()])
        assert parameters_of(flat, found)


def test_a_program_without_averages_says_so() -> None:
    logical = mlp()
    lockstep = begun(Lockstep(lowered(logical, 3, 2)))
    with pytest.raises(UserError, match="--ema"):
        lockstep.full_parameters(ema=True)


def test_the_scratch_of_an_average_does_not_grow_with_the_flat() -> None:
    program = lowered(mlp(precision="fp16", dim=64, ema=DECAY), 3, 2)
    averages = [op for op in program.ops() if isinstance(op, ops.Average)]
    assert averages
    most = 8 * op_scratch.AVERAGED_CHUNK_NUMEL + op_scratch.SCALAR_BYTES
    assert all(0 < op_scratch.scratch_bytes(program, op) <= most for op in averages)
