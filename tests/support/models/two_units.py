"""Two equal units, unless more are asked for, and a loss without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def model(units: int = 2) -> nn.Module:
    return Net(units)


def batch() -> tuple[Tensor, ...]:
    # So many rows that activations are large enough to be offloaded.
    return (torch.zeros(1024, 32),)
