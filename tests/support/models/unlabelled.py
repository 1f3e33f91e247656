"""A small model of tokens whose batches have different numbers of labels; their weight is that number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 11, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = torch.relu(block(hidden)) + hidden
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Model()


def batch() -> tuple[Tensor, Tensor]:
    return next(batches(0, 1, 0))


def weight(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def batches(
    rank: int, world_size: int, seed: int, start_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every third batch of a rank has no labels at all."""
    generator = torch.Generator().manual_seed(seed * world_size + rank + start_step)
    number = rank
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        is_kept = torch.rand((2, LENGTH), generator=generator) < 0.6
        number += 1
        yield tokens, torch.where(is_kept & (number % 3 != 0), tokens, -100)
