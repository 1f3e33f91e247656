"""Strides of dimensions of size 1 change no result of a convolution or norm, and no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.torch_ops import neutral_ops

NO_SEEDS = torch.zeros(0, dtype=torch.int64)
SHAPES = [(2, 8, 1, 1), (16, 32, 1, 1), (3, 1, 9, 9), (1, 1, 6, 6), (2, 8, 1, 7), (4, 6, 1)]


def by_channels(x: Tensor) -> Tensor:
    """The same elements in the same memory, with strides of dimensions of size 1 as a tensor by channels has them."""
    channels = x.shape[1]
    strides = [
        channels if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)
    ]
    if channels == 1:
        strides[1] = 1
    return x.as_strided(x.shape, strides)


def depthwise(x: Tensor, weight: Tensor) -> Tensor:
    kernel = weight.expand(x.shape[1], 1, *([3] * (x.dim() - 2))).contiguous()
    function = F.conv2d if x.dim() == 4 else F.conv1d
    return function(x, kernel, padding=1, groups=x.shape[1])


def dense(x: Tensor, weight: Tensor) -> Tensor:
    kernel = weight.expand(6, x.shape[1], *([3] * (x.dim() - 2))).contiguous()
    function = F.conv2d if x.dim() == 4 else F.conv1d
    return function(x, kernel, padding=1)


def batch_norm(x: Tensor, weight: Tensor) -> Tensor:
    weights = weight.repeat(x.shape[1])
    return F.batch_norm(x, None, None, weights, weights, training=True)


def group_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x, 1, weight.repeat(x.shape[1]))


def results(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> Iterator[list[Tensor]]:
    torch.manual_seed(3)
    values, weight = torch.randn(shape), torch.randn(1)
    for layout_x in (Tensor.clone, by_channels):
        for layout_grad in (Tensor.clone, by_channels):
            x, scale = layout_x(values).requires_grad_(), weight.clone().requires_grad_()
            with neutral_ops(NO_SEEDS):
                y = function(x, scale)
            grad = torch.sin(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape)
            yield [y.detach(), *torch.autograd.grad(y, (x, scale), layout_grad(grad))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [batch_norm, group_norm, depthwise, dense])
def test_ambiguous_strides_change_nothing(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    first, *others = results(function, shape)
    for other in others:
        assert all(map(torch.equal, first, other))


SQUEEZED = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 32)
        self.norm = nn.BatchNorm2d(32)
        self.conv = nn.Conv2d(32, 8, 1)

    def forward(self, x):
        rows = self.layer(x)
        y = rows.view(16, 32, 1, 1) + rows.view(16, 1, 1, 32).permute(0, 3, 1, 2)
        return self.conv(self.norm(y)).cos().mean()

def model():
    return Model()

def batch():
    return (torch.randn(16, 12),)
"""


@pytest.mark.slow
def test_a_model_whose_images_shrink_to_one_element_equals_eager_torch(tmp_path: Path) -> None:
    (tmp_path / "squeezed.py").write_text(SQUEEZED)
    options = make_options({"world_size": 2, "optimizer": "sgd", "lr": 0.1})
    comparison = check_model(str(tmp_path / "squeezed.py"), options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)
