"""Operators that torch does not have: one that this file registers, and torch's own product of groups of rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 6


@torch.library.custom_op("samples::power", mutates_args=())
def power(x: Tensor, exponents: list[int], scale: float = 1.0, way: str = "sum") -> list[Tensor]:
    """The power of each exponent, ``x.sum()`` or ``x.mean()`` of it as a second result."""
    powers = [scale * x**exponent for exponent in exponents]
    total = torch.stack(powers).sum(0)
    return [total, total.mean() if way == "mean" else total.sum()]


@power.register_fake
def _(x: Tensor, *_: object, **__: object) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty(())]


@torch.library.custom_op("samples::power_backward", mutates_args=())
def power_backward(grad: Tensor, x: Tensor, exponents: list[int], scale: float) -> Tensor:
    """The gradient of the first result of ``power``."""
    terms = [scale * exponent * x ** (exponent - 1) for exponent in exponents]
    return grad * torch.stack(terms).sum(0)


@power_backward.register_fake
def _(grad: Tensor, *_: object) -> Tensor:
    return torch.empty_like(grad)


@torch.library.custom_op("samples::mixed", mutates_args=())
def mixed(
    x: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    negate: bool,
    times: int,
    scale: float,
    factor: float | None,
    shift: float | None,
) -> tuple[Tensor, Tensor]:
    """A result of arguments of each kind that a C function takes, and the number of elements."""
    result = x * times * scale * (factor or 1.0) + (shift or 0.0)
    for term in (bias, add):
        result = result if term is None else result + term
    return -result if negate else result, torch.tensor(float(x.numel()))


@mixed.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(())


class _Context(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    exponents: list[int]
    scale: float


def _save(
    ctx: _Context, inputs: tuple[Tensor, list[int], float, str], output: list[Tensor]
) -> None:
    assert len(output) == 2
    x, ctx.exponents, ctx.scale, _way = inputs
    ctx.save_for_backward(x)


def _backward(ctx: _Context, gradients: list[Tensor]) -> tuple[Tensor, None, None, None]:
    (x,) = ctx.saved_tensors
    return power_backward(gradients[0], x, ctx.exponents, ctx.scale), None, None, None


power.register_autograd(_backward, setup_context=_save)


class Groups(nn.Module):
    """Rows times the matrix of their group, where the batch says how the rows are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 8, 8).normal_(std=0.3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = nn.functional.grouped_mm(x, self.weight, offs=ends)
        powers, _ = power(hidden, [1, 2], 0.5, way="mean")
        result: Tensor = self.head(powers).square().mean()
        return result


def model() -> nn.Module:
    return Groups()


def batch() -> tuple[Tensor, Tensor]:
    """The second group has no row."""
    return torch.randn(ROWS, 8), torch.tensor([2, 2, ROWS], dtype=torch.int32)
