"""Strided views count from the beginning of their tensor, wherever it is in its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.torch_ops import neutral_ops
from zeroir.torch_ops.strided import scatter, scatter_by_index, strided_view, strided_view_by_index

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.linear(x))
        {block}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        {model}

def model():
    return Model()

def batch():
    return torch.randn(12, 8)
"""
PLAIN = "return self.last(x).square().mean()"
CASES = {
    "rows apart": ("return h + x", "return self.last(torch.as_strided(x, (2, 8), (16, 1), 8)).square().mean()"),
    "rows that are written": ("return torch.as_strided_scatter(h, x[:2], (2, 8), (16, 1), 8) + x", PLAIN),
    "overlapping windows": (
        "w = h.as_strided((5, 4, 8), (16, 8, 1), h.storage_offset()); return x + (w @ w.mT).mean()",
        PLAIN,
    ),
    "windows of a part": (
        "w = h[1:].as_strided((4, 4, 8), (16, 8, 1)); return x + (w @ w.mT).mean()",
        PLAIN,
    ),
    "windows of what comes from outside": (
        "w = x[2:].as_strided((3, 8), (8, 1), 8); return h + w.sum(0)",
        PLAIN,
    ),
    "a part of a copied part": ("return h", "return self.last(x[4:8].clone()[1:]).square().mean()"),
    "chunks that are not safe": ("a, b = h.unsafe_chunk(2, 1); return torch.cat([b, a * 2], 1)", PLAIN),
    "chunks for others": (
        "return h",
        "a, b = x.unsafe_chunk(2, 1); return (self.last(torch.cat([a, b], 1)) * torch.cat([b, a], 1)).mean()",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_planned_kernels_equal_plain_torch(name: str, tmp_path: Path) -> None:
    block, model = CASES[name]
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(block=block, model=model), "utf-8")
    result = check_model(str(path), make_options({"stage": 3, "world_size": 2}), steps=2, seed=0)
    assert "bit for bit" in str(result)


@pytest.mark.slow
def test_a_view_beyond_its_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    block = "return x + h[1:].as_strided((5, 4, 8), (16, 8, 1)).sum((0, 1))"
    path.write_text(MODEL.format(block=block, model=PLAIN), "utf-8")
    with pytest.raises(UserError, match=r"model\.py:12 .* sees 104 elements of 96"):
        check_model(str(path), make_options({"world_size": 1}), steps=1, seed=0)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], int]:
    """A dense tensor somewhere in a larger storage, and a view of it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    numel = torch.Size(shape).numel()
    x = torch.arange(float(numel + 7))[7:].view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    size = draw(st.lists(st.integers(0, 3), max_size=3))
    stride = draw(st.lists(st.integers(0, 4), min_size=len(size), max_size=len(size)))
    reach = sum(max(s - 1, 0) * t for s, t in zip(size, stride, strict=True))
    return x, size, stride, draw(st.integers(0, max(numel - 1 - reach, 0))) if reach < numel else -1


@examples(200)
@given(window=windows())
def test_the_compilable_variants_are_equal(
    window: tuple[Tensor, list[int], list[int], int],
) -> None:
    x, size, stride, offset = window
    if offset < 0:
        return
    seen = strided_view(x, size, stride, offset)
    assert torch.equal(strided_view_by_index(x, size, stride, offset), seen)
    apart = all(step > 0 for extent, step in zip(size, stride, strict=True) if extent > 1)
    if not apart or len(set(seen.flatten().tolist())) < seen.numel():
        return
    source = -torch.arange(1.0, seen.numel() + 1).view(seen.shape)
    made = scatter(x, source, size, stride, offset)
    assert made.stride() == x.stride()
    assert torch.equal(strided_view(made, size, stride, offset), source)
    assert torch.equal(scatter_by_index(x, source, size, stride, offset), made)


# ---- Strides of dimensions of size 1 change no result of a convolution or norm, and no gradient


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
