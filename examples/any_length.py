"""A small causal language model whose batches have any number of rows and any length, on each rank its own.

Run it with ``zeroir check examples/any_length.py``, or compile it and run the program.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

Tokens = dict[str, Tensor]
VOCABULARY = 50
WIDTH = 16
MOST_ROWS, LONGEST = 6, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (rows, length, width) with the results of both layers added."""
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        more: Tensor = self.dropout(self.down(F.gelu(self.up(x))))
        return x + more


class AnyLength(nn.Module):
    """Two blocks between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the next tokens, and the logits."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def model() -> nn.Module:
    """Make the model."""
    return AnyLength()


def batch_of(rows: int, length: int, seed: int = 0) -> Tokens:
    """Draw a batch; each label follows from its token."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=chance)
    return {"input_ids": tokens, "labels": (tokens * 7 + 3) % VOCABULARY}


def batch() -> Tokens:
    """Return an example batch; other batches have other sizes."""
    return batch_of(3, 12)


def loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Return the loss, and the logits as an output."""
    result: tuple[Tensor, Tensor] = module(**batch)
    return result


def shapes() -> dict[str, tuple[Dim, Dim]]:
    """Say which sizes differ from batch to batch, and how large they may be."""
    rows, length = Dim("rows", max=MOST_ROWS), Dim("length", min=2, max=LONGEST)
    return {"input_ids": (rows, length), "labels": (rows, length)}


def batches(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Tokens]:
    """Yield batches of random sizes."""
    step = start_step
    while True:
        here = seed * 1009 + step * world_size + rank
        chance = torch.Generator().manual_seed(here)
        rows = int(torch.randint(1, MOST_ROWS + 1, (1,), generator=chance))
        length = int(torch.randint(2, LONGEST + 1, (1,), generator=chance))
        yield batch_of(rows, length, here)
        step += 1
