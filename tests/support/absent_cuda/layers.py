"""Modules of torch whose operators, or their results, depend on the device, each with an example batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


def _images(channels: int = 3, size: int = 12) -> dict[str, Tensor]:
    return {"x": torch.randn(2, channels, size, size), "y": torch.randint(5, (2,))}


def _words(rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randint(30, (rows, length)), "y": torch.randint(5, (rows,))}


def _numbers(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape), "y": torch.randint(5, (shape[0],))}


class Classifier(nn.Module):
    """Layers before the mean over all but rows and the last dimension, and a cross entropy of 5 classes."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 5)

    def features(self, x: Tensor) -> Tensor:
        """What the layers make of the input."""
        found: Tensor = self.layers(x)
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        features = self.features(x)
        if features.dim() > 2:
            features = features.flatten(1, -2).mean(1)
        return F.cross_entropy(self.head(features), y)


class LastChannels(nn.Module):
    """The channels of images as the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """The same elements."""
        return x.movedim(1, -1)


class ChannelsLast(nn.Module):
    """The memory format that a module of images is converted to."""

    def forward(self, x: Tensor) -> Tensor:
        """The same elements."""
        return x.contiguous(memory_format=torch.channels_last)


class OutputOf(nn.Module):
    """The first result of a module that returns several, such as a recurrent one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        output: Tensor = self.module(x)[0]
        return output


class SelfAttention(nn.Module):
    """An attention of torch's as it is called, with a mask or causal, and with dropout of its weights or without."""

    def __init__(self, *, is_causal: bool = False, has_mask: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.is_causal, self.has_mask, self.p = is_causal, has_mask, p
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        """The output of two heads."""
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.has_mask else None
        )
        found = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=self.p, is_causal=self.is_causal
        )
        return found.transpose(1, 2).flatten(2)


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """What the function returns."""
        return self.function(x)


def _bags() -> nn.Module:
    class Bags(Classifier):
        def __init__(self) -> None:
            super().__init__(width=24)
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(30, 8, mode=m) for m in ("sum", "mean", "max")
            )

        def features(self, x: Tensor) -> Tensor:
            return torch.cat([bag(x) for bag in self.bags], 1)

    return Bags()


def _sampled() -> nn.Module:
    class Sampled(Classifier):
        def features(self, x: Tensor) -> Tensor:
            grid = self.layers(x).movedim(1, -1).tanh()
            return F.grid_sample(x, grid, align_corners=False).movedim(1, -1)

    return Sampled(nn.Conv2d(3, 2, 3, padding=1), width=3)


def _odd_functions(x: Tensor) -> Tensor:
    sums = x.float().cumsum(-1).to(x.dtype) + x.logsumexp(-1, keepdim=True) + x.sort(-1).values
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) + x.var(-1, keepdim=True)
    found: Tensor = sums + norms + F.softplus(x) + F.logsigmoid(x) + F.silu(x) + F.mish(x)
    return found


LAYERS: Final[Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]]] = {
    "convolutions, batch norm": (
        lambda: Classifier(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, 1, 1, groups=2), nn.BatchNorm2d(8), LastChannels()),
            width=8,
        ),
        _images,
    ),
    "convolutions, channels last": (
        lambda: Classifier(
            *(ChannelsLast(), nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(1)),
            width=32,
        ),
        _images,
    ),
    "transposed convolutions, group norm": (
        lambda: Classifier(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.SiLU()),
            *(nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.InstanceNorm2d(4, affine=True), LastChannels()),
            width=4,
        ),
        _images,
    ),
    "convolutions of 1 and 3 dimensions": (
        lambda: Classifier(
            *(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Unflatten(1, (1, 4))),
            *(nn.Unflatten(2, (2, 2)), nn.Conv3d(1, 2, 2), nn.Flatten(1)),
            width=14,
        ),
        lambda: _numbers(2, 3, 8),
    ),
    "images of other sizes": (
        lambda: Classifier(
            *(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.Upsample(7, mode="bilinear")),
            *(nn.AvgPool2d(2), nn.PReLU(4), LastChannels()),
            width=4,
        ),
        _images,
    ),
    "grid_sample": (_sampled, _images),
    "bags of embeddings": (_bags, _words),
    "LSTM and GRU": (
        lambda: Classifier(
            *(nn.Embedding(30, 8), OutputOf(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1))),
            OutputOf(nn.GRU(8, 8, batch_first=True, bidirectional=True)),
            width=16,
        ),
        _words,
    ),
    "logsigmoid, sums and norms": (
        lambda: Classifier(nn.Linear(6, 6), Function(_odd_functions), width=6),
        lambda: _numbers(4, 6),
    ),
    "layer and RMS norms": (
        lambda: Classifier(
            *(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8), nn.Dropout(0.1)),
            nn.LayerNorm(8, elementwise_affine=False),
            width=8,
        ),
        lambda: _numbers(4, 3, 6),
    ),
    "encoder layer with dropout": (
        lambda: Classifier(
            nn.Embedding(30, 16),
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True),
            width=16,
        ),
        _words,
    ),
    "causal attention": (
        lambda: Classifier(nn.Embedding(30, 16), SelfAttention(is_causal=True), width=16),
        _words,
    ),
    "masked attention": (
        lambda: Classifier(nn.Embedding(30, 16), SelfAttention(has_mask=True), width=16),
        _words,
    ),
    "attention with dropout": (
        lambda: Classifier(nn.Embedding(30, 16), SelfAttention(p=0.1), width=16),
        _words,
    ),
}
"""Makers of modules and batches, by what they show."""
