"""Torch's symbols and guards that the frontend uses: these tests name the part that a new torch changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.frontend.test_torch_private import attempt
from zeroir.frontend._torch_private import fake_mode
from zeroir.frontend._torch_sizes import DimEnv, NoPolynomialError, has_dims, size_of
from zeroir.ir.sizes import Dim

ROWS = Dim(name="rows", minimum=1, maximum=8)
LENGTH = Dim(name="length", minimum=2, maximum=64)


def traced(compute: Callable[[Tensor], Tensor]) -> tuple[DimEnv, Tensor]:
    """Return what a function makes of a tensor of shape (rows, length, 4), without data."""
    env = attempt(lambda: DimEnv({ROWS: 3, LENGTH: 5}))
    with attempt(lambda: fake_mode(env)):
        x = torch.empty([env.symint(size) for size in (ROWS.size, LENGTH.size, 4)])
        return env, attempt(lambda: compute(x))


def test_sizes_are_polynomials_of_dims() -> None:
    env, x = traced(lambda x: torch.cat([x.flatten(0, 1), x.flatten(0, 1)[1:]]))
    assert has_dims([x])
    assert [size_of(size) for size in x.shape] == [ROWS.size * LENGTH.size * 2 - 1, 4]
    assert env.symint(7) == 7
    assert not has_dims([torch.empty(3)])


def test_a_size_that_is_no_polynomial_is_named() -> None:
    env, x = traced(lambda x: x[:, : x.shape[1] // 2])
    del env
    with pytest.raises(NoPolynomialError, match="length//2") as refusal:
        size_of(x.shape[1])
    assert refusal.value.dims == ("length",)


@pytest.mark.parametrize(
    ("compute", "assumption"),
    [
        (lambda x: x * 2 if x.shape[0] > 4 else x, "rows <= 4"),
        (lambda x: x + torch.empty(5, 4), "length = 5"),
        (lambda x: x if x.shape[0] < x.shape[1] else x * 2, "rows < length"),
        (lambda x: x * 2 if x.shape[0] == 1 else x, "rows != 1"),
        (lambda x: x * 2 if x.shape[0] % 2 else x, "Mod(rows, 2) != 0"),
        (lambda x: x * len(range(x.shape[0])), "rows = 3"),
    ],
)
def test_what_a_trace_assumes_is_named(
    compute: Callable[[Tensor], Tensor], assumption: str
) -> None:
    env, _ = traced(compute)
    (made,) = [each for each in env.assumptions if each.text == assumption]
    assert made.line.startswith("test_torch_sizes.py:")
    assert made.dims == tuple(name for name in ("rows", "length") if name in assumption)
