"""A small network on images of any height and width: convolutions with strides, then attention within blocks of 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

Images = dict[str, Tensor]
MOST_ROWS, SHORTEST, LONGEST = 4, 5, 23
BLOCK = 4


class AnySize(nn.Module):
    """The lines of an image attend to those of their block; the last block is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the logits."""
        x = self.pool(F.gelu(self.stem(pixels))).mean(3).transpose(1, 2)
        rows, length, width = x.shape
        x = F.pad(x, (0, 0, 0, (BLOCK - length % BLOCK) % BLOCK))
        q, k, v = self.qkv(x.view(rows, -1, BLOCK, width)).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v).flatten(1, 2)[:, :length]
        logits = self.head(x.mean(1))
        return F.cross_entropy(logits, labels), logits


def model() -> nn.Module:
    """Make the model."""
    return AnySize()


def batch_of(rows: int, height: int, width: int, seed: int = 0) -> Images:
    """Draw a batch."""
    chance = torch.Generator().manual_seed(seed)
    pixels = torch.randn(rows, 3, height, width, generator=chance)
    return {"pixels": pixels, "labels": torch.randint(5, (rows,), generator=chance)}


def batch() -> Images:
    """Return an example batch; other batches have other sizes."""
    return batch_of(3, 20, 13)


def loss(module: nn.Module, batch: Images) -> tuple[Tensor, Tensor]:
    """Return the loss, and the logits as an output."""
    result: tuple[Tensor, Tensor] = module(**batch)
    return result


def shapes() -> dict[str, tuple[Dim | int, ...]]:
    """Say which sizes differ from batch to batch, and how large they may be."""
    rows = Dim("rows", max=MOST_ROWS)
    height, width = (Dim(name, min=SHORTEST, max=LONGEST) for name in ("height", "width"))
    return {"pixels": (rows, 3, height, width), "labels": (rows,)}


def batches(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Images]:
    """Yield batches of random sizes."""
    step = start_step
    while True:
        here = seed * 1009 + step * world_size + rank
        chance = torch.Generator().manual_seed(here)
        rows = int(torch.randint(1, MOST_ROWS + 1, (1,), generator=chance))
        height, width = torch.randint(SHORTEST, LONGEST + 1, (2,), generator=chance).tolist()
        yield batch_of(rows, height, width, here)
        step += 1
