"""Operators whose constants meet dims compute what eager PyTorch does at every size, or are refused by line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

LARGEST: Final = 12


class Mean(nn.Module):
    """The mean over what an operator makes of a line of 4 numbers for each row."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        y = self.operator.compute(self.line(x), *self.operator.numbers)
        loss: Tensor = y.square().mean()
        return loss


class Operator(NamedTuple):
    """An operator with its constants."""

    name: str
    compute: Callable[..., Tensor]
    numbers: tuple[int, ...]


def _rows(x: Tensor) -> int:
    return x.shape[0]


OPERATORS: Final[dict[str, tuple[Callable[..., Tensor], int]]] = {
    "x[:a]": (lambda x, a: x[:a], 1),
    "x[a:]": (lambda x, a: x[a:], 1),
    "x[-a:]": (lambda x, a: x[-a:], 1),
    "x[:-a]": (lambda x, a: x[:-a], 1),
    "x[a:b]": (lambda x, a, b: x[a : a + b], 2),
    "x[a:-b]": (lambda x, a, b: x[a:-b], 2),
    "x[::a]": (lambda x, a: x[::a], 1),
    "x[:a:b]": (lambda x, a, b: x[:a:b], 2),
    "x[a]": (lambda x, a: x[a], 1),
    "x[-a]": (lambda x, a: x[-a], 1),
    "x[:N//a]": (lambda x, a: x[: _rows(x) // a], 1),
    "x[:N-a]": (lambda x, a: x[: _rows(x) - a], 1),
    "x[:min(a, N)]": (lambda x, a: x[: min(a, _rows(x))], 1),
    "select": (lambda x, a: x.select(0, a), 1),
    "narrow": (lambda x, a, b: x.narrow(0, a, b), 2),
    "split": (lambda x, a: x.split(a)[0], 1),
    "split, last": (lambda x, a: x.split(a)[-1], 1),
    "split in two": (lambda x, a: x.split([a, _rows(x) - a])[1], 1),
    "tensor_split": (lambda x, a: x.tensor_split(a)[0], 1),
    "tensor_split, last": (lambda x, a: x.tensor_split(a)[-1], 1),
    "tensor_split at": (lambda x, a: x.tensor_split([a])[0], 1),
    "chunk": (lambda x, a: x.chunk(a)[0], 1),
    "unfold": (lambda x, a, b: x.unfold(0, a, b), 2),
    "topk": (lambda x, a: x.topk(a, 0).values, 1),
    "kthvalue": (lambda x, a: x.kthvalue(a, 0).values, 1),
    "pad to": (lambda x, a: F.pad(x, (0, 0, 0, a - _rows(x))), 1),
    "pad by": (lambda x, a, b: F.pad(x, (0, 0, a, -b)), 2),
    "roll": (lambda x, a: x.roll(a, 0) * torch.arange(_rows(x))[:, None], 1),
    "flip": (lambda x, a: x.flip(0)[:a], 1),
    "tril": (lambda x, a: (x @ x.T).tril(a - 4), 1),
    "diagonal": (lambda x, a: (x @ x.T).diagonal(a), 1),
    "flat[:a]": (lambda x, a: x.reshape(-1)[: 3 * a], 1),
    "flat.view(-1, a)": (lambda x, a: x.reshape(-1, a), 1),
    "cat": (lambda x, a, b: torch.cat([x[:a], x[b:]]), 2),
    "indices": (lambda x, a: x[torch.arange(_rows(x)).clamp(max=a)], 1),
    "a table": (lambda x, a: x + torch.linspace(0, 1, a)[: _rows(x), None], 1),
    "repeat": (lambda x, a: x.repeat(a, 1) * torch.arange(a * _rows(x))[:, None], 1),
}


@st.composite
def operators(draw: st.DrawFn) -> Operator:
    name = draw(st.sampled_from(sorted(OPERATORS)))
    compute, count = OPERATORS[name]
    return Operator(name, compute, tuple(draw(st.integers(1, LARGEST)) for _ in range(count)))


def loss_of(module: nn.Module, batch: Tensor) -> Tensor | None:
    """The loss of eager PyTorch, None where its operators refuse this size."""
    try:
        loss: Tensor = module(batch)
    except (RuntimeError, IndexError):
        return None
    return loss


def require_same_losses(operator: Operator, example: int, smallest: int) -> None:
    """Compare the losses for several sizes with eager PyTorch's, bit by bit."""
    torch.manual_seed(0)
    module = Mean(operator)
    plain = copy.deepcopy(module)
    if loss_of(plain, torch.zeros(example, 4)) is None:
        return
    try:
        engine = zeroir.compile(
            module,
            torch.zeros(example, 4),
            shapes=(Dim("rows", min=smallest, max=LARGEST), 4),
            stage=0,
            optimizer="sgd",
            lr=0.0,
            evaluate=False,
        ).engine(self_check=False)
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
        _require_same_losses(engine, plain, sorted({smallest, example, 8, LARGEST}))
    assert not refusal or "test_constants_beside_dims.py:" in refusal


def _require_same_losses(engine: Engine, plain: nn.Module, sizes: Sequence[int]) -> None:
    for rows in sizes:
        batch = torch.randn(rows, 4)
        expected = loss_of(plain, batch)
        try:
            loss = engine.step(batch).loss
        except UserError:
            continue
        assert expected is not None, f"takes {rows} rows, and eager PyTorch refuses them"
        assert loss == expected or expected.isnan(), f"{loss} at {rows} rows, not {expected.item()}"
    engine.close()


@pytest.mark.filterwarnings("ignore:.*the sizes of the batch decide")
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(operators(), st.integers(1, LARGEST), st.sampled_from((1, 2)))
def test_constants_beside_dims_are_not_ignored(
    operator: Operator, example: int, smallest: int
) -> None:
    require_same_losses(operator, max(example, smallest), smallest)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the sizes of the batch decide")
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_no_operator_ignores_a_constant(name: str) -> None:
    compute, count = OPERATORS[name]
    for numbers, example in (((6, 2), 4), ((3, 1), 4), ((4, 4), 7), ((1, 1), 1)):
        require_same_losses(Operator(name, compute, numbers[:count]), example, 1)
