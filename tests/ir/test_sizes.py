"""Sizes that depend on dims: they compute as polynomials, and are integers at the bound."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.errors import UserError
from zeroir.ir.size_bounds import grows, highest, lowest
from zeroir.ir.size_text import UnknownDimError, parse_size
from zeroir.ir.sizes import Dim, Size, exact_quotient, quotient

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
DIVISORS = st.sampled_from([1, 2, 3, 4, 6, 16])
QUOTIENTS = st.builds(quotient, SIZES, DIVISORS).filter(lambda q: q is not None)
ROUNDED = st.builds(lambda a, q, b: a * q + b, SIZES, QUOTIENTS, SIZES)
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
        assert exact_quotient(product, b) == a
    if isinstance(a, Size) and b:
        exact = exact_quotient(a, b)
        assert exact is None or at(exact, point) * at(b, point) == at(a, point)


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
    if isinstance(size, Size) and grows(size):
        assert 0 <= size.at(point) <= int(size)


def test_sizes_in_shapes() -> None:
    rows, length = DIMS["rows"].size, DIMS["length"].size
    multiple, shrinking = length * 8, length - rows * 41
    assert isinstance(multiple, Size)
    assert isinstance(shrinking, Size)
    assert str(rows * length * 64 - rows) == "length*rows*64-rows"
    assert (rows * length * 32) // (rows * 32) == length
    assert multiple.linear == (8, DIMS["length"], 0)
    values = {number: multiple.linear.value_of_dim(number) for number in (8, 24, 25, 328)}
    assert values == {8: None, 24: 3, 25: None, 328: None}
    shorter = rows * 2 - 1
    assert isinstance(shorter, Size)
    assert shorter.linear == (2, DIMS["rows"], -1)
    assert [shorter.linear.value_of_dim(number) for number in (2, 3)] == [None, 2]
    assert shrinking.linear is None
    assert not grows(shrinking)
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


@given(SIZES | ROUNDED, DIVISORS, POINTS)
def test_a_rounded_quotient_is_that_of_the_values(
    a: int, divisor: int, point: dict[str, int]
) -> None:
    rounded = quotient(a, divisor)
    if rounded is None:
        return
    assert at(rounded, point) == at(a, point) // divisor
    if isinstance(rounded, Size):
        assert parse_size(str(rounded), DIMS) == rounded
        assert rounded.dims <= {*DIMS.values()}
        assert copy.deepcopy(rounded) == rounded


@given(ROUNDED, POINTS, POINTS)
def test_sizes_with_quotients_grow_only_if_they_do(
    a: int, point: dict[str, int], other: dict[str, int]
) -> None:
    if isinstance(a, Size):
        assert lowest(a) <= a.at(point) <= highest(a)
    if isinstance(a, Size) and grows(a):
        larger = {name: max(point[name], other[name]) for name in point}
        assert 0 <= a.at(point) <= a.at(larger) <= a.at_bound
        fixed = {dim: point[dim.name] for dim in a.dims}
        assert a.replaced(fixed) == a.at(point)


def rounded(dividend: int, divisor: int) -> int:
    """Return a quotient that there is."""
    size = quotient(dividend, divisor)
    assert size is not None
    return size


def test_what_all_products_share_decides_no_growth() -> None:
    rows = Dim(name="rows", minimum=1, maximum=8).size
    length = Dim(name="length", minimum=4, maximum=64).size
    size = rows * (length - 2) * (length - 2)
    assert isinstance(size, Size)
    assert grows(size)


def test_quotients_that_are_equal_are_one_size() -> None:
    length, rows = DIMS["length"].size, DIMS["rows"].size
    half = rounded(length, 2)
    for other in (
        rounded(3 * length, 6),
        -rounded(1 - length, 2),
        length - rounded(length + 1, 2),
        rounded(length + 6, 2) - 3,
    ):
        assert other == half
    assert rounded(32 * length + 1, 2) == 16 * length
    assert rounded(rounded(length - 1, 2) + 2, 2) == rounded(length + 3, 4)
    quarter = rounded(rounded(length - 1, 2) - 1, 2)
    padding = 4 - (quarter - 4 * rounded(quarter, 4))
    blocks = rounded(quarter + padding - 4 * rounded(padding, 4), 4)
    assert blocks == rounded(length + 9, 16)
    assert rounded(length, 64) == 0
    sides = [rounded(dim + 1, 2) for dim in (length, DIMS["width"].size)]
    area = sides[0] * sides[1] * rows
    assert isinstance(area, Size)
    assert grows(area)
    assert str(rounded(rows * length + 3, 4)) == "((length*rows+3)//4)"
    third = rounded(length, 3)
    assert str(third * third * 3) == "(length//3)^2*3"
    assert str(half) == "-((length+1)//2)+length"
    assert quotient(half * length + 1, 4) is None


@pytest.mark.parametrize(
    "text", ["(length//0)", "((length//2)//2)", "(length//2", "length//2", "(//2)", "(2//x)"]
)
def test_what_is_no_quotient_is_no_size(text: str) -> None:
    assert parse_size(text, DIMS) is None
