"""A model whose code lets sizes decide trains on batches of both sides with the bits of eager PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.numerics.signature_workers import MICRO_STEPS, STEPS, batch_of, compiled_for, counted
from tests.runtime.support import Ranks, require_success
from zeroir.api.checks.reference import replicas_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def of_replicas(
    world_size: int, options: Mapping[str, object]
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Return the parameters and each rank's losses of eager PyTorch: of a step, then of an evaluation before it."""
    compiled = compiled_for(world_size, options).specialise(micro_steps=MICRO_STEPS)
    assert compiled.source is not None
    source = replace(compiled.source, weight=counted)
    replicas = replicas_of(compiled.logical, source, compiled.options, seed=0, steps=STEPS)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        batches = [
            [batch_of(rank, step, micro) for micro in range(MICRO_STEPS)]
            for rank in range(world_size)
        ]
        evaluated = replicas.evaluate([own[0] for own in batches])
        for rank, pair in enumerate(zip(replicas.step(batches), evaluated, strict=True)):
            losses[rank] += pair
    return replicas.parameters(), losses


OFFLOADED = {
    "stage": 3,
    "precision": "bf16",
    "offload": "optimizer,parameters,gradients",
    "recompute": "*",
}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(3, {"stage": 3}), (1, {"stage": 3}), (2, {"stage": 1}), (2, {"stage": 2}), (2, OFFLOADED)],
    ids=str,
)
def test_both_sides_of_a_decision_give_the_bits_of_eager_pytorch(
    tmp_path: Path, world_size: int, options: dict[str, object]
) -> None:
    module = "tests.numerics.signature_workers"
    environment = {"OPTIONS": json.dumps(options)}
    ranks = Ranks(world_size, tmp_path, module=module, environment=environment)
    require_success(ranks.wait())
    parameters, losses = of_replicas(world_size, options)
    for rank, expected in enumerate(losses):
        found = load_file(tmp_path / f"trained{rank}.safetensors")
        assert found.pop(f"losses{rank}").tolist() == torch.tensor(expected).tolist()
        assert found.keys() == parameters.keys()
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name


def test_ranks_run_no_programs_together_that_communicate_in_different_orders(
    tmp_path: Path,
) -> None:
    module = "tests.numerics.signature_workers"
    ranks = Ranks(2, tmp_path, "crossed", module=module)
    require_success(ranks.wait())


def test_changes_reach_ranks_that_run_different_programs(tmp_path: Path) -> None:
    module = "tests.numerics.signature_workers"
    ranks = Ranks(2, tmp_path, "annealed", module=module)
    require_success(ranks.wait())


def test_the_first_step_of_several_batches_may_be_of_both_sides(tmp_path: Path) -> None:
    module = "tests.numerics.signature_workers"
    ranks = Ranks(2, tmp_path, "mixed", module=module)
    require_success(ranks.wait())


def test_numbers_that_differ_between_ranks_are_refused_where_a_program_computes_with_them(
    tmp_path: Path,
) -> None:
    module = "tests.numerics.signature_workers"
    ranks = Ranks(2, tmp_path, "numbers", module=module)
    require_success(ranks.wait())
