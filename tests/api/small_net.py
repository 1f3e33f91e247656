"""A small module in hand, changed as a test likes, and its program."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import zeroir


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.second(torch.tanh(self.first(x))))
        return y.square().mean() * self.scale


def made(change: Callable[[Net], object]) -> Net:
    torch.manual_seed(0)
    net = Net()
    change(net)
    return net


def unchanged(_: Net) -> None:
    """Change nothing."""


BATCH = (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def compiled(net: nn.Module) -> zeroir.CompiledProgram:
    return zeroir.compile(net, BATCH, world_size=1, optimizer="sgd", lr=0.1)
