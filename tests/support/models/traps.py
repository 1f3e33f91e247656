"""A model of everything that is easy to get wrong: tied, frozen, unused and twice-called parts, batch norm, dropout."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
VOCABULARY = 24


class Half(torch.autograd.Function):
    """x / 2, with a backward of its own."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


class Block(nn.Module):
    """A residual layer with dropout, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.25)

    def inner(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.drop(self.down(F.relu(self.drop(self.up(self.norm(x))))))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + mixed


class Traps(nn.Module):
    """Forward takes a dict's entries and returns a dict that holds the loss."""

    scale: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.features = nn.Linear(5, WIDTH)
        blocks = [Block(WIDTH) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.again = blocks[0]  # one module under two names
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(1))
        self.offset = nn.Parameter(torch.tensor(0.125))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 7)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.bias = torch.full((WIDTH,), 0.25)  # a plain attribute

    def forward(self, *, tokens: Tensor, features: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.features(features)[:, None] * self.scale + self.bias
        for block in self.blocks:
            x = block(x)
        x = self.again(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.shared(torch.tanh(self.shared(x)))
        half: Callable[[Tensor], Tensor] = Half.apply
        x = half(self.frozen(x)) + torch.tensor([0.5, -0.5]).repeat(WIDTH // 2)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = F.dropout(x - self.mean, 0.1, self.training)
        logits = self.head(x) * self.temperature + self.offset
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits, "loss": loss}


def init(module: nn.Module) -> None:
    match module:
        case nn.Embedding():
            nn.init.normal_(module.weight, std=0.5)


def model() -> nn.Module:
    return Traps()


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(24).reshape(4, 6) % VOCABULARY
    return {
        "tokens": tokens,
        "features": torch.linspace(-1, 1, 20).reshape(4, 5),
        "targets": (tokens * 7 + 1) % VOCABULARY,
    }
