"""Mixtures of experts of transformers: they equal eager replicas, at every stage, and where experts get no tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.eager import traced
from tests.support.lowering import proved_for
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.frontend import load_model_file
from zeroir.runtime.execution.lockstep import Lockstep

MODEL = Path(__file__).parents[1] / "support" / "models" / "experts.py"
FAMILIES = ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss", "olmoe"]
RANKS = 3
EXPERTS = "model.layers.*.self_attn,model.layers.*.mlp.experts"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_eager_replicas(family: str) -> None:
    """At one stage for each family; the next tests have all stages, and experts that are units of their own."""
    options = make_options({"stage": FAMILIES.index(family) % 4, "world_size": RANKS})
    comparison = check_model(f"{MODEL}:{family}", options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_trains_with_the_same_losses_on_other_batches_for_each_rank(
    family: str,
) -> None:
    """With three tokens for each rank, at least two of its eight experts get none, on each rank other ones."""
    model_file = load_model_file(f"{MODEL}:{family}")
    logical = traced(f"{MODEL}:{family}", world_size=RANKS, lr=0.003)
    assert {operator.module for operator in logical.operators} == {"transformers.integrations.moe"}
    batches = [[model_file.batch()] for _ in range(RANKS)]
    losses: list[list[float]] = []
    for stage in range(4):
        program = proved_for(
            logical, make_options({"stage": stage, "world_size": RANKS, "lr": 0.003})
        )
        lockstep = Lockstep(program, seed=0, schedule_seed=stage)
        lockstep.initialise(model_file.model, 0)
        losses.append([float(lockstep.step(batches)[0].loss) for _ in range(5)])
    assert all(each == losses[0] for each in losses)
    assert losses[0][-1] < losses[0][0] - 0.05


@pytest.mark.slow
def test_experts_are_units_of_their_own() -> None:
    """Gathered ahead, updated in host memory, and kept there: as eager replicas, where two experts get no token."""
    choices = {
        "stage": 3,
        "world_size": RANKS,
        "units": EXPERTS,
        "prefetch": 2,
        "offload": ("optimizer", "gradients", "parameters"),
    }
    logical = traced(f"{MODEL}:mixtral", units=EXPERTS, world_size=RANKS)
    experts = {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    assert experts <= {flat.name for flat in logical.flats}
    comparison = check_model(f"{MODEL}:mixtral", make_options(choices), steps=2, seed=0)
    assert comparison.is_equal, str(comparison)


ONE_BY_ONE = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        chosen = [torch.where((choice == i)[:, None], e(x), 0.0) for i, e in enumerate(self.experts)]
        return (sum(chosen) * weight[:, None]).square().mean()

def model():
    return Experts()

def batch():
    return torch.randn(2, 8)
"""


@pytest.mark.slow
def test_each_expert_of_a_list_may_be_a_unit(tmp_path: Path) -> None:
    """With two tokens for each rank, at least two of the four experts get none."""
    path = tmp_path / "experts.py"
    path.write_text(ONE_BY_ONE)
    choices = {"stage": 3, "world_size": RANKS, "units": "experts.*", "prefetch": 1}
    options = make_options({**choices, "evaluate": False})
    names = {flat.name for flat in traced(path, units="experts.*", evaluate=False).flats}
    assert names >= {f"experts.{number}" for number in range(4)}
    assert check_model(str(path), options, steps=2, seed=0).is_equal
