"""The GPT of the comparison with other systems: 8 layers of width 512, 29.5 million parameters, as a zeroir model file.

Pre-norm blocks, learned positions, an untied head, no dropout; the loss is the mean cross-entropy.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096
LAYERS = 8
WIDTH = 512
HEADS = 8
LENGTH = 128
BATCH = 4


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it: (batch, length, width) to the same."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return result


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """Tokens and their successors, both int64 (batch, length), to the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())


def model() -> nn.Module:
    """The module to train."""
    return GPT()


def batch() -> tuple[Tensor, Tensor]:
    """An example of one rank's batch."""
    return next(batches(0, 1, 0, 0))


def batches(
    rank: int, world_size: int, seed: int, start_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(1234 + seed)
    step = 0
    while True:
        drawn = torch.randint(0, VOCABULARY, (world_size, BATCH, LENGTH + 1), generator=generator)
        if step >= start_step:
            yield drawn[rank, :, :-1].contiguous(), drawn[rank, :, 1:].contiguous()
        step += 1
