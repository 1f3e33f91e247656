"""Two towers with a contrastive loss: each rank's rows against those of all ranks, which it gathers in every way."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import all_gather


class Block(nn.Module):
    """A layer; ``is_centred`` subtracts what is in the middle of the rows of all ranks."""

    def __init__(self, *, is_centred: bool = False) -> None:
        super().__init__()
        self.is_centred = is_centred
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.layer(x).tanh(), 0.1, self.training)
        if self.is_centred:
            x = x - torch.stack(all_gather(x)).mean((0, 1))  # type: ignore[no-untyped-call]
        return x


class Towers(nn.Module):
    """Features of two kinds of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(is_centred=True), Block()])
        self.other = nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return F.normalize(x, dim=-1), F.normalize(self.other(y), dim=-1)


Batch = tuple[Tensor, Tensor, Tensor]


def model() -> Towers:
    return Towers()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 8, generator=generator)
    return x, y, torch.tensor([0, 1, 2, 1])


def with_own_gradient(x: Tensor) -> Tensor:
    """The rows of all ranks, of which this rank's alone have a gradient."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def loss(towers: Towers, batch: Batch) -> Tensor:
    """The mean over rows of both directions, and of those with the same label."""
    x, y, label = batch
    features, others = towers(x, y)
    start, count = len(x) * dist.get_rank(), dist.get_world_size() * len(x)
    place = torch.arange(start, start + len(x))
    labels = torch.empty(count, dtype=label.dtype)
    dist.all_gather_into_tensor(labels, label)
    world = dist.group.WORLD
    assert world is not None
    of_all = functional.all_gather_tensor_autograd(features, 0, world)
    to_all = features @ with_own_gradient(others).T
    clip = F.cross_entropy(5 * to_all.float(), place)
    clip = clip + F.cross_entropy(5 * (others @ of_all.T).float(), place)
    apart = torch.zeros(dist.get_world_size(), *others.shape, dtype=others.dtype)
    apart[dist.get_rank()] = others
    clip = clip + (apart.flatten(0, 1) * with_own_gradient(others)).float().mean()
    alike = (labels[start : start + len(x), None] == labels).float()
    loss: Tensor = clip - 0.1 * (to_all.log_softmax(-1) * alike).mean()
    return loss
