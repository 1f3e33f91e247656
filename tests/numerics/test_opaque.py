"""Ranks whose code decides by values, each for itself, train over real process groups with the bits of replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.opaque_workers import MICRO_STEPS, STEPS, batches_of, compiled_for
from tests.runtime.support import Ranks, require_success
from tests.support import deciding_modules
from zeroir.api.capture import file_source
from zeroir.api.checks.reference import replicas_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"stage": 3, "prefetch": 2, "shapes": "0: 2<=rows<=6, _"}),
        (3, {"stage": 3, "recompute": "branches.*,drops.*"}),
        (3, {"stage": 2, "offload": "optimizer,gradients", "shapes": "0: 2<=rows<=6, _"}),
    ],
    ids=str,
)
def test_each_rank_decides_for_itself(
    tmp_path: Path, world_size: int, options: dict[str, object]
) -> None:
    ranks = Ranks(
        world_size,
        tmp_path,
        module="tests.numerics.opaque_workers",
        environment={"OPTIONS": json.dumps(options)},
    )
    require_success(ranks.wait())
    compiled = compiled_for(world_size, options)
    source = file_source(deciding_modules.__file__)
    replicas = replicas_of(compiled.logical, source, compiled.options, seed=0, steps=STEPS)
    of_ranks = [batches_of(rank, options) for rank in range(world_size)]
    expected = [replicas.step([own[step] for own in of_ranks]) for step in range(STEPS)]
    assert all(len(batches) == MICRO_STEPS for batches in of_ranks[0])
    parameters = replicas.parameters()
    for rank in range(world_size):
        found = load_file(tmp_path / f"trained{rank}.safetensors")
        assert found["losses"].tolist() == torch.tensor([each[rank] for each in expected]).tolist()
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name
