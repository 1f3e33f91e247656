"""Tall, wide and square matrices whose sides are no multiples of a vector, one larger than a rank's slice,
a convolution, which has matrices in its last two dimensions, vectors and a scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(35, 35) for _ in range(2))
        self.tall = nn.Linear(35, 51, bias=False)
        self.wide = nn.Linear(51, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1) * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.wide(self.tall(x)).square().mean()
        return loss


def model() -> nn.Module:
    return Net()


def batch() -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(5)),)
