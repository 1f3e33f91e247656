"""What the ranks and the test that judges them must agree on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.config import CompileOptions, make_options
from zeroir.torch_ops.batches import Batch

STEPS = 20
MODEL_STEPS = 4
CASES: dict[str, tuple[str, float | None]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "fp16": ("fp16", 0.5),
}
"""Precision and clipping by name."""


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
