"""The model of the checkpoints in ``tests/data/deepspeed_checkpoints``: what its parameters are, and its data.

``tools/record_deepspeed_checkpoints.py`` trains it with DeepSpeed and writes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS = 10, 11
STEPS_BEFORE, STEPS_AFTER = 3, 5
LR, BETAS = 1e-2, (0.8, 0.95)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 13)
        self.outer = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outer: Tensor = self.outer(torch.tanh(self.inner(self.norm(x))))
        return x + outer


class Net(nn.Module):
    """Odd sizes that ranks do not share evenly, a tied weight, a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.register_buffer("bias", torch.linspace(-1, 1, TOKENS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x) + self.get_buffer("bias")
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


def batch(step: int, rank: int) -> Tensor:
    """The batch of a rank in a step: i64[4, 6]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, TOKENS, (4, 6), generator=generator)
