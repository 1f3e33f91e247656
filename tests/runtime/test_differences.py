"""Results are compared where they are finite, and infinities and NaN with the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, inf, nan

from zeroir.runtime.kernels.differences import difference, is_beyond_noise

MIXED = (1.0, -2.0, inf, -inf, nan)
ROUNDED = (1.0 + 2e-7, -2.0, inf, -inf, nan)


def numbers(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_infinities_and_nan_are_no_difference(dtype: torch.dtype) -> None:
    result, wanted = numbers(ROUNDED).to(dtype), numbers(MIXED).to(dtype)
    assert difference(result, wanted, 1e-6) is None
    assert not is_beyond_noise(result, wanted, result)


def test_a_finite_difference_beside_infinities_is_found() -> None:
    result, wanted = numbers((1.5, -2.0, inf, -inf, nan)), numbers(MIXED)
    assert difference(result, wanted, 1e-6) == (
        "differs in 1 elements, by up to 0.5 where the largest is 2"
    )
    assert is_beyond_noise(result, wanted, numbers(ROUNDED))


@pytest.mark.parametrize("element", range(5))
@pytest.mark.parametrize("value", [inf, -inf, nan, 3.0])
def test_infinity_where_another_value_is_due_is_found(element: int, value: float) -> None:
    wanted, result = numbers(MIXED), numbers(MIXED)
    result[element] = value
    if element in (0, 1) and value == 3.0:
        return  # a finite difference, as above
    is_same = bool(torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0)))
    found = difference(result, wanted, 1e-6)
    assert found is None if is_same else found is not None and "infinite or NaN" in found
    assert is_beyond_noise(result, wanted, wanted) is not is_same


def test_what_roundings_make_infinite_decides_nothing() -> None:
    result, wanted = numbers((1.0, inf)), numbers((1.0, 3.4e38))
    assert difference(result, wanted, 1e-6) is not None
    assert not is_beyond_noise(result, wanted, numbers((1.0, inf)))
