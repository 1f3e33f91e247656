"""Modules whose code decides by the values of tensors or reads them, in ways that no trace has; and a model of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

WIDTH = 8


class Branch(nn.Module):
    """Takes one of two layers, by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + torch.relu(self.left(x))
        y: Tensor = x + self.right(x)
        return y


class LayerDrop(nn.Module):
    """Is left out at random, and has running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (torch.rand([]) < 0.4 or random.random() < 0.1):
            return x
        y: Tensor = self.dropout(x + torch.tanh(self.norm(self.layer(x))))
        return y


class Turns(nn.Module):
    """Multiplies complex numbers, and returns several tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.rand(WIDTH // 2))

    def forward(self, x: Tensor, *, scale: float) -> dict[str, object]:
        angles = self.angles.float()
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        y = scale * torch.view_as_real(turned).flatten(-2)
        return {"y": y.to(x.dtype), "n": 2, "mask": x > 0}


class Selects(nn.Module):
    """Computes on as many rows as are positive, and changes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        self.get_buffer("seen").add_(len(rows))
        x[rows] = self.layer(x[rows])
        return x.sin()


class Deciding(nn.Module):
    """A model of repeated blocks that decide, and others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.drops = nn.ModuleList(LayerDrop() for _ in range(3))
        self.turns, self.selects = Turns(), Selects()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for module in (*self.branches, *self.drops):
            x = module(x)
        turned = self.turns(x, scale=0.5)
        x = torch.where(turned["mask"], turned["y"] * turned["n"], x)
        y: Tensor = self.last(self.selects(x * 1.0)).square().mean()
        return y


def model() -> nn.Module:
    return Deciding()


def batch() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def batches(rank: int, _: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        yield torch.randn(6, 4, generator=generator)
