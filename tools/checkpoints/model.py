"""A model so small that saving it takes longer than a step. Its batches depend on the step and the rank alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

ROWS = 4
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """See ``zeroir compile``."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))


def batch() -> Batch:
    """See ``zeroir compile``."""
    return torch.zeros(ROWS, 32), torch.zeros(ROWS, dtype=torch.int64)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """See ``zeroir compile``."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def batches(rank: int, world_size: int, seed: int, start_step: int) -> Iterator[Batch]:
    """See ``zeroir run``."""
    step = start_step
    while True:
        chance = torch.Generator().manual_seed(seed + step * world_size + rank)
        yield (
            torch.randn(ROWS, 32, generator=chance),
            torch.randint(0, 8, (ROWS,), generator=chance),
        )
        step += 1
