"""Code that divides a size, or asks for its remainder, gives the bits of eager PyTorch at every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._sympy.functions import FloorDiv, Mod

import zeroir
from zeroir.api.running.signatures import left_out
from zeroir.config.shapes import SizeClass
from zeroir.errors import ModelWarning
from zeroir.frontend._torch_size_values import holds_for_each, modulus_of
from zeroir.ir.sizes import Dim as SizeDim
from zeroir.ir.sizes import Size

LONGEST = 24
Code = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A line of 4 numbers for each word, from which other code computes."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        y = self.code(self.line(x))
        return (y * torch.arange(y.shape[1])[:, None]).square().mean()


def _every_other(x: Tensor) -> Tensor:
    return torch.cat([x[:, ::2], x[:, 1::3]], 1)


def _windows(x: Tensor) -> Tensor:
    return x.unfold(1, 2, 2).mean(-1)


def _halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    return torch.cat([second * 2, first], 1)


def _blocks(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(x.shape[0], -1, 4, 4).mean(2)


def _one_hot(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).flip(0)
    return F.one_hot(places, x.shape[1]).float() @ x + F.one_hot(places % 4, 4)


def _scaled(x: Tensor) -> Tensor:
    """With numbers that are computed of sizes, in Python, and in the backward of the deviation."""
    length = x.shape[1]
    weight = math.sqrt(length) + (1 / length) * 3 - length**-0.5
    scaled: Tensor = (x / math.log(length + 1) - x.std(1, keepdim=True)) * -weight / 1.7
    return scaled


def _ends(x: Tensor) -> Tensor:
    """The backward reads the last word from what the forward saves as a part of it."""
    middle = x[..., x.shape[1] // 2, :].unsqueeze(1) + x[None, 0, x.shape[1] - 1]
    return x * (x[:, -1] * x[:, 0]).tanh()[:, None] * x[:, -2:-1] + middle


def _twice_if_even(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] % 2 == 0 else x


def _padded_if_odd(x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    return x.view(x.shape[0], -1, 2, 4).sum(2)


class Compared:
    """An engine beside eager PyTorch, for 2 to 24 words."""

    def __init__(self, code: Code, length: int = 7) -> None:
        torch.manual_seed(0)
        self.eager = Net(code)
        self.optimizer = torch.optim.SGD(self.eager.parameters(), lr=0.1)
        self.compiled = zeroir.compile(
            deepcopy(self.eager),
            torch.randn(3, length, 4),
            shapes=(Dim("rows", min=2, max=4), Dim("length", min=2, max=LONGEST), 4),
            stage=0,
            optimizer="sgd",
            lr=0.1,
            evaluate=False,
        )
        self.engine = self.compiled.engine(self_check=False)

    def step(self, rows: int, length: int) -> None:
        batch = torch.randn(rows, length, 4)
        loss = self.eager(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.engine.step(batch).loss == loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [_every_other, _windows, _halves, _blocks, _one_hot, _scaled, _ends]
)
def test_one_program_has_the_bits_of_eager_pytorch(code: Code) -> None:
    compared = Compared(code)
    for rows, length in ((4, LONGEST), (2, 2), (3, 3), (2, 16), (3, 9)):
        compared.step(rows, length)
    (length_dim, _) = compared.engine.program.dims
    assert (length_dim.minimum, length_dim.maximum) == (2, LONGEST)
    compared.engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* the sizes of the batch decide")
def test_odd_and_even_sizes_have_a_program_each() -> None:
    compared = Compared(_padded_if_odd)
    used: dict[int, set[str]] = {0: set(), 1: set()}
    for rows, length in ((4, LONGEST), (2, 3), (3, 16), (2, 7), (2, 2), (3, 9)):
        compared.step(rows, length)
        used[length % 2].add(str(compared.engine.program.inputs[0].shape[1]))
    assert used == {0: {"length_by_2*2"}, 1: {"length_by_2*2-1"}}
    compared.engine.close()


@pytest.mark.slow
def test_the_line_that_asks_for_a_remainder_is_named() -> None:
    line = _twice_if_even.__code__.co_firstlineno + 1
    with pytest.warns(
        ModelWarning, match=rf"test_divided_sizes\.py:{line} .* only where length % 2 = 1"
    ):
        compared = Compared(_twice_if_even)
    compared.engine.close()
    assert left_out(compared.compiled) == ["length = length_by_2*2-1 with length_by_2 from 2 to 12"]


@pytest.mark.slow
def test_a_class_that_does_not_exist_is_no_vector_of_zeros() -> None:
    compared = Compared(lambda x: x + F.one_hot(torch.arange(x.shape[1]) // 4, 4))
    compared.step(2, 16)
    with pytest.raises(Exception, match="out of bounds"):
        compared.engine.step(torch.randn(2, 17, 4))
    compared.engine.close()


def test_questions_are_answered_for_each_value() -> None:
    n, m = sympy.symbols("n m", integer=True)
    parts = sympy.Eq(FloorDiv(n + FloorDiv(n + 1, 2) - 1, FloorDiv(n + 1, 2)), 2)
    assert holds_for_each(parts, {n: (2, 99)})
    assert holds_for_each(parts, {n: (1, 99)}) is False
    assert holds_for_each(sympy.Ne(Mod(n, m), 3), {n: (1, 9), m: (1, 3)})
    # Too many, unknown functions, divisions by 0.
    assert holds_for_each(parts, {n: (2, 10**6)}) is None
    assert holds_for_each(sympy.Gt(sympy.sqrt(n), 0), {n: (2, 9)}) is None
    assert holds_for_each(sympy.Ne(Mod(m, n), 9), {n: (0, 9), m: (0, 9)}) is False
    assert modulus_of(sympy.Ne(Mod(n, 4) + FloorDiv(m, 6), 0)) == 12
    assert modulus_of(sympy.Ne(n, 4)) is None


@pytest.mark.parametrize("remainder", range(4))
def test_a_class_has_the_values_of_one_remainder(remainder: int) -> None:
    dim = SizeDim(name="length", minimum=2, maximum=17)
    size = SizeClass(4, remainder).size(dim)
    assert isinstance(size, Size)
    (of_class,) = size.dims
    assert of_class.minimum >= 1
    values = [size.at({of_class.name: n}) for n in range(of_class.minimum, of_class.maximum + 1)]
    assert values == [n for n in range(2, 18) if n % 4 == remainder]
    few = SizeDim(name="length", minimum=3, maximum=5)
    assert SizeClass(4, remainder).size(few) == (
        4 if remainder == 0 else remainder + 4 if remainder == 1 else remainder
    )
