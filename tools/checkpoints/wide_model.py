"""A model whose state takes long to write: with AdamW in FP32, 12 bytes for each of its 33.6 million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYERS = 8
WIDTH = 2048
ROWS = 64


def model() -> nn.Module:
    """See ``zeroir compile``."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch() -> Tensor:
    """See ``zeroir compile``."""
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    """See ``zeroir compile``."""
    output: Tensor = module(batch)
    return output.square().mean()
