"""Mixtures of experts of transformers: they equal eager replicas, at every stage, and where experts get no tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.eager import traced
from tests.support.lowering import proved_for
from zeroir.api.check import check_model
from zeroir.config import make_options
from zeroir.frontend import load_model_file
from zeroir.runtime.lockstep import Lockstep

MODEL = Path(__file__).parents[1] / "support" / "models" / "experts.py"
FAMILIES = ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss", "olmoe"]
RANKS = 3
EXPERTS = "model.layers.*.self_attn,model.layers.*.mlp.experts"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_eager_replicas(family: str) -> None:
    """At one stage for each family, and with the experts as units of their own; the next test has all stages."""
    stage = FAMILIES.index(family) % 4
    units = EXPERTS if family == "mixtral" else None
    options = make_options({"stage": stage, "world_size": RANKS, "units": units})
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
