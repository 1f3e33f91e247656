"""Modules of which ``mlp(dim=96)`` is the training step, made by constructors of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.testing import make_tensor

DIM = 96


class Mlp(nn.Module):
    """The module that ``mlp()`` is the training step of."""

    def __init__(self, dim: int = 8, features: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.pre = nn.Linear(features, dim, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(blocks))
        self.post = nn.Linear(dim, features, bias=False)


def plain() -> nn.Module:
    return Mlp(dim=DIM)


def sparse() -> nn.Module:
    module = plain()
    nn.init.sparse_(module.get_parameter("blocks.1.weight"), sparsity=0.3)
    return module


def without_zeros() -> nn.Module:
    module = Mlp(dim=DIM)
    made = make_tensor(DIM, DIM, dtype=torch.float32, device="cpu", exclude_zero=True)
    module.blocks[0].weight = nn.Parameter(made)
    return module


def discarding() -> nn.Module:
    """A constructor that draws many tensors of many sizes and dtypes, as torch's own tests do, and keeps none."""
    shapes: list[tuple[int, ...]] = [(), (1,), (5, 5), (2, 3, 4), (15,), (16,), (17,), (10, 1, 7)]
    for shape in shapes:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            make_tensor(shape, dtype=dtype, device="cpu", low=None, high=None, noncontiguous=True)
            make_tensor(shape, dtype=dtype, device="cpu", exclude_zero=True)
        torch.randn(shape, dtype=torch.complex64)
        torch.randperm(len(shape) + 40)
    return plain()


def of_another_form() -> nn.Module:
    """Parameters of other dtypes, transposed, and made with a generator and states of their own."""
    module = Mlp(dim=DIM).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        nn.init.orthogonal_(module.get_parameter("blocks.2.weight"))
    module.pre.half()
    module.post.weight = nn.Parameter(torch.randn(DIM, 6).t())
    own = torch.Generator().manual_seed(5)
    nn.init.trunc_normal_(module.get_parameter("blocks.0.weight"), a=-1.0, b=1.0, generator=own)
    nn.init.constant_(module.get_parameter("blocks.1.bias"), float(torch.rand(9).numpy()[3]))
    return module


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "sparse_": sparse,
    "exclude_zero": without_zeros,
    "of another form": of_another_form,
    "discarding": discarding,
}
