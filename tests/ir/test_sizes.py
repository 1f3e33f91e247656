"""Sizes that depend on dims: they compute as polynomials, and are integers at the bound."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.errors import UserError
from zeroir.ir.sizes import Dim, Size, UnknownDimError, parse_size

DIMS = {
    name: Dim(name=name, minimum=low, maximum=high)
    for name, low, high in (("rows", 1, 6), ("length", 2, 40), ("width", 3, 9))
}
NUMBERS = st.integers(-50, 50)
SIZES: st.SearchStrategy[int] = st.recursive(
    NUMBERS | st.sampled_from([dim.size for dim in DIMS.values()]),
    lambda inner: st.builds(
        lambda how, a, b: how(a, b),
        st.sampled_from([lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b]),
        inner,
        inner,
    ),
    max_leaves=6,
)
POINTS = st.fixed_dictionaries(
    {name: st.integers(dim.minimum, dim.maximum) for name, dim in DIMS.items()}
)


def at(size: int, point: dict[str, int]) -> int:
    return size.at(point) if isinstance(size, Size) else size


@given(SIZES, SIZES, POINTS)
def test_arithmetic_of_sizes_is_that_of_their_values(a: int, b: int, point: dict[str, int]) -> None:
    operations: list[Callable[[int, int], int]] = [
        lambda x, y: x + y,
        lambda x, y: x - y,
        lambda x, y: x * y,
    ]
    for operation in operations:
        assert at(operation(a, b), point) == operation(at(a, point), at(b, point))
    bound = {name: dim.maximum for name, dim in DIMS.items()}
    assert int(a) == at(a, bound)
    assert (a < b) == (int(a) < int(b))


@given(SIZES, SIZES, POINTS)
def test_a_quotient_that_is_a_size_is_exact(a: int, b: int, point: dict[str, int]) -> None:
    product = a * b
    if isinstance(product, Size) and b:
        quotient = product // b
        if product % b == 0 and isinstance(quotient, Size):
            assert at(quotient, point) * at(b, point) == at(product, point)


@given(SIZES, SIZES)
def test_sizes_are_equal_as_polynomials(a: int, b: int) -> None:
    assert (a == b) == (not isinstance(a - b, Size) and a - b == 0)
    if a == b:
        assert hash(a) == hash(b)
    if isinstance(a, Size):
        assert a != int(a)


@given(SIZES)
def test_the_text_of_a_size_says_all_of_it(size: int) -> None:
    if isinstance(size, Size):
        assert parse_size(str(size), DIMS) == size
        assert copy.deepcopy(size) == size
        assert f"{size:,}" == f"{int(size):,}"


@given(SIZES, POINTS)
def test_a_size_that_grows_is_largest_at_the_bound(size: int, point: dict[str, int]) -> None:
    if isinstance(size, Size) and size.grows:
        assert 0 <= size.at(point) <= int(size)


def test_sizes_in_shapes() -> None:
    rows, length = DIMS["rows"].size, DIMS["length"].size
    multiple, shrinking = length * 8, length - rows * 41
    assert isinstance(multiple, Size)
    assert isinstance(shrinking, Size)
    assert str(rows * length * 64 - rows) == "length*rows*64-rows"
    assert (rows * length * 32) // (rows * 32) == length
    assert multiple.multiple == (8, DIMS["length"])
    values = {number: multiple.multiple.value_of_dim(number) for number in (8, 24, 25, 328)}
    assert values == {8: None, 24: 3, 25: None, 328: None}
    assert shrinking.multiple is None
    assert not shrinking.grows
    assert parse_size("12", DIMS) == 12
    assert parse_size("rows*", DIMS) is None
    with pytest.raises(UnknownDimError, match="depth"):
        parse_size("depth*2", DIMS)


def test_a_size_is_bounded() -> None:
    """A file may say anything, also what would take hours to multiply out or to print."""
    assert parse_size("+".join(["rows"] * 10_000), DIMS) is None
    power = parse_size("rows^16*length^16", DIMS)
    assert isinstance(power, Size)
    too_large: list[Callable[[], object]] = [
        lambda: power * power,
        lambda: parse_size("rows^99", DIMS),
        lambda: parse_size("*".join(["rows^99"] * 2_000), DIMS),
        lambda: parse_size(f"{10**18 + 1}*rows", DIMS),
        lambda: power * 10**19,
        lambda: math.prod(
            sum(
                (Dim(name=f"{letter}{index}", minimum=1, maximum=9).size for index in range(50)),
                start=0,
            )
            for letter in "ab"
        ),
    ]
    for attempt in too_large:
        with pytest.raises(UserError, match="give fewer dims"):
            attempt()
