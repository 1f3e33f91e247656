"""Batches of other shapes in each step and on each rank give the bits of eager PyTorch at these shapes."""

from __future__ import annotations

import pytest

from examples import any_length
from zeroir.api.checks.check import check_model
from zeroir.config import make_options

CASES: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0, "world_size": 2},
    "stage 2 with micro-steps in bf16": {
        "stage": 2, "world_size": 3, "precision": "bf16", "micro_steps": 3, "clip": 1.0,
    },
    "stage 3 in fp16, recomputed": {"stage": 3, "world_size": 4, "precision": "fp16", "recompute": "*"},
    "everything offloaded": {
        "stage": 3, "world_size": 2, "precision": "bf16", "offload": "optimizer,parameters,gradients",
    },
    "hybrid, speculative": {
        "stage": 2, "mesh": "replicate=2,shard=2", "offload": "optimizer,gradients", "clip": 1.0, "speculate": True,
    },
    "paged": {"stage": 3, "world_size": 2, "precision": "bf16", "page_optimizer": "16KiB", "page_bytes": "4KiB"},
    "8-bit states, moving averages": {"stage": 1, "world_size": 2, "optimizer_bits": 8, "ema": 0.9},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_shape_gives_the_bits_of_eager_pytorch(name: str) -> None:
    result = check_model(any_length.__file__, make_options(CASES[name]), steps=5, seed=3)
    assert result.is_equal, result
    assert len(set(result.losses)) == 5


@pytest.mark.slow
def test_one_step_of_each_rank_s_own_shape() -> None:
    result = check_model(
        any_length.__file__, make_options({"stage": 3, "world_size": 2}), steps=2, seed=1
    )
    assert result.is_equal, result
