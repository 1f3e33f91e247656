"""A model whose evaluation differs from its training: dropout, batch norm, a part that only eval() uses, outputs."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 12, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.relu(self.norm(self.linear(x))), 0.3, self.training)


class Model(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.calibration = nn.Linear(CLASSES, CLASSES)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1.0
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if self.training else self.calibration(logits)


def model() -> nn.Module:
    return Model()


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(6) % CLASSES, (torch.arange(6) * 3) % CLASSES


def batches(
    rank: int, world_size: int, seed: int, start_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed * 100 + start_step * world_size + rank)
    while True:
        tokens = torch.randint(CLASSES, (2, 6), generator=generator)
        yield tokens[0], tokens[1]


def eval_batches(rank: int, world_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + seed * world_size + rank)
    for _ in range(3):
        tokens = torch.randint(CLASSES, (2, 6), generator=generator)
        yield tokens[0], tokens[1]


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, object]]:
    tokens, targets = batch
    logits = module(tokens)
    found = F.cross_entropy(logits, targets)
    return found, {"logits": logits, "best": (logits.argmax(-1), [logits.t()]), "loss": found}
