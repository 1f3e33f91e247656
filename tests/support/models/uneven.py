"""Blocks that are not alike: three of three kinds, and an encoder of two blocks with a decoder of another one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 512
LENGTH = 256


class Block(nn.Module):
    """A perceptron on a residual path: it saves ``inner`` values a row."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Sharpen(nn.Module):
    """Saves much, and computes little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mix(x)
        for _ in range(4):
            h = 3 * F.softmax(h, dim=-1)
        return x + h


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList([Block(64, 128), Sharpen(64), Block(64, 256)])
        self.last = nn.Linear(64, WORDS)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.last(h), targets)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.encoder = nn.ModuleList(Block(96, 96) for _ in range(2))
        self.between = nn.Linear(96, 48)
        self.decoder = nn.ModuleList([Block(48, 192)])
        self.last = nn.Linear(48, WORDS)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.encoder:
            h = block(h)
        h = self.between(h)
        for block in self.decoder:
            h = block(h)
        return F.cross_entropy(self.last(h), targets)


def mixed() -> nn.Module:
    return Mixed()


def coder() -> nn.Module:
    return Coder()


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(LENGTH, 16), torch.zeros(LENGTH, dtype=torch.long)
