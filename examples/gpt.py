"""A small GPT that learns to write English, byte by byte.

    zeroir compile examples/gpt.py --stage 3 -o build/gpt.zir

A model file offers `model`, which builds the module whose forward returns the loss, and `batch`,
an example of one rank's micro-batch: enough to compile. `batches` adds the data to train on, and
`init` gives the parameters that one module holds itself their first values.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = Path(__file__).parent / "data" / "python-topics.txt"

VOCABULARY = 256  # every byte is a token
LENGTH = 64
BATCH = 16
WIDTH = 128
HEADS = 4
LAYERS = 4


class ResidualLinear(nn.Linear):
    """The last projection of a residual branch: zero at first, so a new block changes nothing."""


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = ResidualLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it: (batch, length, width) to the same."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = ResidualLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add both sub-layers to the residual stream."""
        x = x + self.attention(self.norm1(x))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """A decoder-only transformer whose head is tied to its embedding."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting `targets` from `tokens`."""
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def init(module: nn.Module) -> None:
    """Initialise in place the parameters that `module` itself holds, not its children's."""
    match module:
        case ResidualLinear():
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        case nn.Linear():
            nn.init.normal_(module.weight, std=WIDTH**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        case nn.Embedding():
            nn.init.normal_(module.weight, std=WIDTH**-0.5)
        case nn.LayerNorm():
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def model() -> nn.Module:
    """Build the model; `init` is then called on each of its modules."""
    return GPT(WIDTH, HEADS, LAYERS)


def batch() -> tuple[Tensor, Tensor]:
    """Return one rank's micro-batch by shape and type: tokens and targets, (BATCH, LENGTH)."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return tokens, tokens.clone()


def batches(
    rank: int, world_size: int, seed: int, start_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches for ever; (rank, world_size, seed, step) alone decide each of them.

    Every step draws one global batch of places in the text, and each rank takes its slice of it.
    """
    text = _text()
    window = torch.arange(LENGTH + 1)
    step = start_step
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - LENGTH, (world_size * BATCH,), generator=generator)[
            rank * BATCH : (rank + 1) * BATCH
        ]
        pieces = text[starts[:, None] + window]
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
        step += 1


def unigram_entropy() -> float:
    """Return the entropy in nats of the text's byte frequencies: what a model beats by context."""
    frequencies = torch.bincount(_text(), minlength=VOCABULARY).double() / len(_text())
    return float(torch.special.entr(frequencies).sum())


@functools.cache
def _text() -> Tensor:
    return torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
