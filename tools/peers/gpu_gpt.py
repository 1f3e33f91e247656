"""The GPT of the comparison on a GPU, as a zeroir model file: pre-norm blocks, learned positions, an untied head.

Its shape is in the environment, so that one file serves every size: ``BENCH_GPT=24x2048x16x2048x4`` are layers, width,
heads, tokens per sample and samples per batch, and what is built without it: 1.42 billion parameters.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50304
VARIABLE = "BENCH_GPT"
SHAPE = "24x2048x16x2048x4"


def shape() -> tuple[int, int, int, int, int]:
    """Layers, width, heads, tokens per sample, samples per batch."""
    layers, width, heads, length, batch = map(int, os.environ.get(VARIABLE, SHAPE).split("x"))
    return layers, width, heads, length, batch


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it: (batch, length, width) to the same."""
        batch, length, width = x.shape
        view = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(view).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """Tokens and their successors, both int64 (batch, length), to the mean cross-entropy, taken in FP32."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
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
        return F.cross_entropy(logits.float(), targets.flatten())


def model() -> GPT:
    """The module to train."""
    layers, width, heads, length, _ = shape()
    return GPT(layers, width, heads, length)


def batch() -> tuple[Tensor, Tensor]:
    """An example of one rank's batch."""
    return batches(1, seed=0)[0]


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and their successors."""
    *_, length, samples = shape()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (count, samples, length + 1), generator=generator)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]
