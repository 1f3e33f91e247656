"""What the ranks and the test that judges them must agree on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.runtime.support import random_batches
from zeroir.config import CompileOptions, make_options
from zeroir.torch_ops.batches import Batch

STEPS = 6
MODEL_STEPS = 4
CASES: dict[str, tuple[str, float | None]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "fp16": ("fp16", 0.5),
    "8-bit": ("fp16", 0.5),
}
"""Precision and clipping by name."""

CODED = frozenset({"8-bit"})
"""The cases whose optimizer states have 8 bits."""


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """A scheduler that changes the learning rate and the momentum in every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=MODEL_STEPS + 1)


def model_options(world_size: int) -> CompileOptions:
    """How model files are compiled."""
    return make_options({"world_size": world_size, "precision": "bf16"})


def varied(example: Batch, step: int, rank: int) -> Batch:
    """The example batch with other values: integers in another order, floats moved."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def vary(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor + torch.randn(tensor.shape, generator=generator)
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape)

    batch: Batch = pytree.tree_map_only(torch.Tensor, vary, example)
    return batch


def micro_batches(world_size: int) -> list[list[list[Batch]]]:
    """``[step][rank][micro_step]``: steps of one to three batches."""
    drawn = random_batches(MODEL_STEPS, world_size, micro_steps=3)
    return [[own[: 1 + step % 3] for own in ranks] for step, ranks in enumerate(drawn)]


def weight_of_values(batch: Batch) -> float:
    """Another weight for each batch, a whole number, so that sums of them are exact."""
    assert isinstance(batch, dict)
    (x,) = batch.values()
    assert isinstance(x, Tensor)
    return 1.0 + int(7 * float(x.double().sum())) % 5
