"""Two small blocks, a norm and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


def model() -> nn.Module:
    return Net()


def batch() -> tuple[Tensor, ...]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(5)),)
