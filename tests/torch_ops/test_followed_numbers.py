# ruff: noqa: ARG005 - every use takes both numbers
"""Followed numbers give tensors the bits that plain numbers give, and remember every other use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zeroir.torch_ops import neutral_ops
from zeroir.torch_ops.followed_numbers import FollowedNumbers, Number, followed_by_math

Use = Callable[[Tensor, Any, Any], Tensor]


def updated(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    y = x.clone()
    change(y)
    return y


FOLLOWED: Mapping[str, Use] = {
    "product": lambda x, b, k: x * b + b * x,
    "quotient": lambda x, b, k: x / b + x / k,
    "of 1 less": lambda x, b, k: (1 - b) * x,
    "power of the number": lambda x, b, k: x * b**k,
    "divided": lambda x, b, k: b / x,
    "by name": lambda x, b, k: torch.mul(x, b) * torch.true_divide(x, k),
    "in place": lambda x, b, k: updated(x, lambda y: y.mul_(b).div_(k)),
    "assigned": lambda x, b, k: updated(x, lambda y: y.__imul__(b)),
    "of one element": lambda x, b, k: x.sum() * b + x.sum() / k,
    "an integer before": lambda x, b, k: (0.5 * k) * x - k * x,
    "bounds": lambda x, b, k: x.clamp(min=-b, max=1.0) + x.clamp(-b, b) + x.clip(max=b),
    "chosen": lambda x, b, k: torch.where(x > 0, x, b) * torch.where(x > 0, b, x),
    "masked": lambda x, b, k: x.masked_fill(x > 0, b),
    "made": lambda x, b, k: torch.tensor(b) * torch.full_like(x, b) * torch.tensor(k),
    "of math": lambda x, b, k: x * math.exp(-b) * math.floor(k / 2),
    "in torch's Python code": lambda x, b, k: F.normalize(x, eps=b),
}
"""Uses in which every later value counts."""

SUMS: Mapping[str, Use] = {
    "sum": lambda x, b, k: x + b,
    "difference": lambda x, b, k: b - x,
    "of integers": lambda x, b, k: (x > 0).long() * b + (x > 0).long() * k,
    "added in place": lambda x, b, k: updated(x, lambda y: y.add_(b)),
}
"""The same, where 16-bit tensors on CPUs are an exception."""

READ: Mapping[str, tuple[Use, str]] = {
    "an operator's argument": (lambda x, b, k: F.leaky_relu(x, b), "beta"),
    "an exponent": (lambda x, b, k: x.abs() ** b, "beta"),
    "smoothing": (
        lambda x, b, k: F.cross_entropy(x, torch.arange(4), label_smoothing=b),
        "beta",
    ),
    "a size": (lambda x, b, k: x[:, :k] * torch.ones(k), "k"),
    "a factor of a sum": (lambda x, b, k: torch.add(x, x, alpha=k), "k"),
    "a branch": (lambda x, b, k: x if b > 0.1 else -x, "beta > 0.1"),
    "the least": (lambda x, b, k: x * min(1.0, k / 2), "(k / 2) < 1.0"),
    "the truth": (lambda x, b, k: x if b else -x, "bool(beta)"),
    "a conversion": (lambda x, b, k: x * int(b * 10), "int((beta * 10))"),
    "masked integers": (lambda x, b, k: (x > 0).long().masked_fill(x > 1, int(b)), "int(beta)"),
    "masks of other kinds": (lambda x, b, k: torch.where(x > 0, k, (x > 0).long()), "k"),
    "a key": (lambda x, b, k: x * {3: 0.5}[k], "k"),
}
"""Uses that read the number, with what is remembered."""

VALUES: Mapping[str, Number] = {"beta": 0.3, "k": 3}


def outcomes(use: Use, dtype: torch.dtype, beta: Any, k: Any) -> list[Tensor]:  # noqa: ANN401 - both kinds of numbers
    """Return the result of a use, and the gradient where there is one."""
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with neutral_ops(torch.arange(0)), followed_by_math():
        y = use(x, beta, k)
    return [y, *(torch.autograd.grad(y.sum(), [x]) if y.requires_grad else ())]


def require_equal(use: Use, dtype: torch.dtype) -> FollowedNumbers:
    numbers = FollowedNumbers(VALUES)
    followed = outcomes(use, dtype, *map(numbers.number, VALUES))
    for found, expected in zip(followed, outcomes(use, dtype, 0.3, 3), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_followed_number_gives_the_bits_of_a_plain_one(name: str, dtype: torch.dtype) -> None:
    numbers = require_equal(FOLLOWED[name], dtype)
    assert not numbers.answers
    assert len(numbers.tensors)


@pytest.mark.parametrize("name", SUMS)
def test_a_followed_number_in_a_sum_gives_the_bits_of_a_plain_one(name: str) -> None:
    assert not require_equal(SUMS[name], torch.float32).answers


@pytest.mark.parametrize("name", READ)
def test_a_number_that_is_read_is_remembered(name: str) -> None:
    use, text = READ[name]
    assert text in require_equal(use, torch.float32).answers


def test_tensors_have_the_present_values() -> None:
    numbers = FollowedNumbers(VALUES)
    x = torch.ones(2)
    with neutral_ops(torch.arange(0)), followed_by_math():
        beta, k = map(cast("Callable[[str], Any]", numbers.number), VALUES)
        _ = x * math.sqrt(1 - beta) * k
        _ = x if k < 5 else -x
    numbers.values.update(beta=0.75, k=7)
    numbers.write_tensors()
    assert [tensor.item() for tensor in numbers.tensors] == [0.5, 7.0]
    assert dict(numbers.present_answers()) == {"k < 5": False}
    assert {text: answer for text, (_, answer) in numbers.answers.items()} == {"k < 5": True}
    assert numbers.names == {"beta", "k"}


def test_a_number_whose_value_was_read_is_not_followed() -> None:
    numbers = FollowedNumbers(VALUES)
    with neutral_ops(torch.arange(0)):
        _ = F.leaky_relu(torch.ones(2), cast("float", numbers.number("beta")))
    assert numbers.names == {"k"}
