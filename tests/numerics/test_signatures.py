"""A model whose code lets sizes decide trains on batches of both sides with the bits of eager PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.numerics.signature_workers import MICRO_STEPS, SIDES, batch_of, compiled_for, counted
from tests.runtime.support import COMPILING_SOURCES, Ranks, require_success
from zeroir.api.checks.reference import replicas_of

pytestmark = pytest.mark.dist


def of_replicas(world_size: int, stage: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Return the parameters and each rank's losses of eager PyTorch: of a step, then of an evaluation before it."""
    compiled = compiled_for(world_size, stage).specialise(micro_steps=MICRO_STEPS)
    assert compiled.source is not None
    source = replace(compiled.source, weight=counted)
    replicas = replicas_of(compiled.logical, source, compiled.options, seed=0, steps=len(SIDES))
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(len(SIDES)):
        batches = [
            [batch_of(rank, step, micro) for micro in range(MICRO_STEPS)]
            for rank in range(world_size)
        ]
        evaluated = replicas.evaluate([own[0] for own in batches])
        for rank, pair in enumerate(zip(replicas.step(batches), evaluated, strict=True)):
            losses[rank] += pair
    return replicas.parameters(), losses


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [
        (3, 3),
        *(pytest.param(n, stage, marks=pytest.mark.slow) for n, stage in ((1, 3), (2, 1), (3, 1))),
    ],
)
def test_both_sides_of_a_decision_give_the_bits_of_eager_pytorch(
    tmp_path: Path, world_size: int, stage: int
) -> None:
    module = "tests.numerics.signature_workers"
    environment = {"STAGE": str(stage)}
    ranks = Ranks(
        world_size, tmp_path, module=module, sources=COMPILING_SOURCES, environment=environment
    )
    require_success(ranks.wait())
    parameters, losses = of_replicas(world_size, stage)
    for rank, expected in enumerate(losses):
        found = load_file(tmp_path / f"trained{rank}.safetensors")
        assert found.pop(f"losses{rank}").tolist() == torch.tensor(expected).tolist()
        assert found.keys() == parameters.keys()
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name
