"""Sizes that depend on dims: a program that has dims is for batches of many shapes.

A dim is a number of elements that each micro-batch has for itself, such as its length. Shapes, strides and numbers of
elements that depend on dims are polynomials in them. A ``Size`` is such a polynomial, and an integer: the polynomial's
value where each dim has its largest value. So whatever computes with integers computes at that bound, sums and products
keep the polynomial, and everything else (quotients, comparisons) is about the bound. ``quotient`` divides a size and
rounds down, as a convolution with a stride does with heights; where it is not exact, it is a factor like a dim.

Two sizes are equal if they are the same polynomial; a size that depends on a dim equals no plain integer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Final, NamedTuple

from zeroir.errors import UserError
from zeroir.ir.dtypes import DType
from zeroir.ir.fields import Declares, NameKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """A number that each micro-batch has for itself: any of ``minimum`` to ``maximum``, both included."""

    syntax: ClassVar[str] = "{name} from={minimum} to={maximum}"

    name: Annotated[str, Declares(NameKind.DIM)]
    minimum: int
    maximum: int

    @property
    def size(self) -> Size:
        """The dim itself as a size."""
        return _size(((1, ((self, 1),)),))

    def __hash__(self) -> int:
        return hash(self.name)


RESERVED_NAMES: Final = frozenset(("inf", "nan", "none", "true", "false", *map(str, DType)))
"""What no dim can be called, because it means something else in the text of a program."""


@dataclass(frozen=True, slots=True)
class Quotient:
    """A polynomial of dims divided by a number from 2 on, rounded down; the coefficients of dims are positive.

    So its largest value is where each dim has its largest one. ``quotient`` makes them.
    """

    dividend: Size
    divisor: int

    @property
    def name(self) -> str:
        """The text of the factor."""
        text = str(self.dividend)
        return f"(({text})//{self.divisor})" if _SUM.search(text) else f"({text}//{self.divisor})"


_SUM: Final = re.compile("[+-]")

Factor = Dim | Quotient

Monomial = tuple[tuple[Factor, int], ...]
"""The factors of a product with their powers, in the order of their names."""

Terms = tuple[tuple[int, Monomial], ...]
"""The products that a polynomial adds up, each with its coefficient; a constant has no dims."""


class Size(int):
    """A number of elements that depends on dims; see the module's docstring."""

    terms: Terms
    _hash: int

    def __new__(cls, terms: Terms) -> Size:
        size = super().__new__(cls, _value(terms, maximum))
        size.terms = terms
        size._hash = hash(terms)
        return size

    def at(self, values: Mapping[str, int]) -> int:
        """Return the value where the dims have these values, by name."""
        return _value(self.terms, lambda dim: values[dim.name])

    def replaced(self, values: Mapping[Dim, int]) -> int:
        """Return the size where these dims are these sizes; a plain integer where no dim is left."""
        return substituted(self.terms, lambda factor: _replaced(factor, values))

    @property
    def at_bound(self) -> int:
        """The value where each dim is as large as it may be, a plain integer."""
        return int.__add__(self, 0)

    @property
    def dims(self) -> frozenset[Dim]:
        """The dims that it depends on."""
        dims: set[Dim] = set()
        for factor in self.factors:
            dims.update((factor,) if isinstance(factor, Dim) else factor.dividend.dims)
        return frozenset(dims)

    @property
    def factors(self) -> frozenset[Factor]:
        """The dims and the quotients that it is a polynomial of."""
        return frozenset(factor for _, monomial in self.terms for factor, _ in monomial)

    @property
    def linear(self) -> LinearSize | None:
        """The size as a multiple of one dim and a number; None of any other size."""
        match self.terms:
            case ((factor, ((Dim() as dim, 1),)),):
                return LinearSize(factor, dim, 0)
            case ((factor, ((Dim() as dim, 1),)), (number, ())) | (
                (number, ()),
                (factor, ((Dim() as dim, 1),)),
            ):
                return LinearSize(factor, dim, number)
            case _:
                return None

    def __reduce__(self) -> tuple[type[Size], tuple[Terms]]:
        return Size, (self.terms,)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Size) and self.terms == other.terms)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: int) -> int:
        return _added(self, other)

    __radd__ = __add__

    def __neg__(self) -> int:
        return _multiplied(self, -1)

    def __sub__(self, other: int) -> int:
        return _added(self, -other)

    def __rsub__(self, other: int) -> int:
        return _added(-self, other)

    def __mul__(self, other: int) -> int:
        return _multiplied(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        """Return an exact quotient as a size; any other is about the bound."""
        quotient = exact_quotient(self, other)
        return int(self) // int(other) if quotient is None else quotient

    def __mod__(self, other: int) -> int:
        return int(self) % int(other) if exact_quotient(self, other) is None else 0

    def __str__(self) -> str:
        """Return the polynomial, such as ``batch*length*64-batch``, in the form that ``parse_size`` reads."""
        parts: list[str] = []
        for coefficient, monomial in self.terms:
            factors = [dim.name if power == 1 else f"{dim.name}^{power}" for dim, power in monomial]
            if not factors or abs(coefficient) != 1:
                factors.append(str(abs(coefficient)))
            parts.append(("-" if coefficient < 0 else "+" if parts else "") + "*".join(factors))
        return "".join(parts)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else format(int(self), spec)

    def __int__(self) -> int:
        return self.at_bound

    def __index__(self) -> int:
        return self.at_bound


class LinearSize(NamedTuple):
    """A multiple of one dim plus a number, from whose value that of the dim follows."""

    factor: int
    dim: Dim
    number: int

    def value_of_dim(self, size: int) -> int | None:
        """Return the dim's value where this is ``size``; None where it has none in its range."""
        value, rest = divmod(size - self.number, self.factor)
        return value if not rest and self.dim.minimum <= value <= self.dim.maximum else None


# A program has few different sizes, and passes and proofs compute the same sums and products of them again and again.
MOST_KEPT: Final = 1 << 14


@lru_cache(MOST_KEPT)
def _size(terms: Terms) -> Size:
    """Return one and the same object for equal terms, so that comparisons are fast."""
    return Size(terms)


@lru_cache(MOST_KEPT)
def _added(left: int, right: int) -> int:
    return sum_of([*_terms(left), *_terms(right)])


@lru_cache(MOST_KEPT)
def _multiplied(left: Size, right: int) -> int:
    return sum_of([(a * b, _product(x, y)) for a, x in left.terms for b, y in _terms(right)])


@lru_cache(MOST_KEPT)
def exact_quotient(size: Size, divisor: int) -> int | None:
    """Return the quotient of two polynomials, None where there is a remainder."""
    factors = sorted(
        {
            factor
            for terms in (size.terms, _terms(divisor))
            for _, powers in terms
            for factor, _ in powers
        },
        key=lambda factor: factor.name,
    )

    def powers_of(term: tuple[int, Monomial]) -> tuple[int, ...]:
        powers = dict(term[1])
        return degree_of(term[1]), *(powers.get(factor, 0) for factor in factors)

    if not divisor:
        return None
    leading = max(_terms(divisor), key=powers_of)
    exact: int = 0
    rest: int = size
    while _terms(rest):
        # Long division: the product of the highest degree is the leading one times one of the quotient.
        term = max(_terms(rest), key=powers_of)
        _, *powers = (a - b for a, b in zip(powers_of(term), powers_of(leading), strict=True))
        if term[0] % leading[0] or min(powers, default=0) < 0:
            return None
        part = sum_of(
            [(term[0] // leading[0], monomial_of(dict(zip(factors, powers, strict=True))))]
        )
        exact, rest = part + exact, rest - part * divisor
    return exact


def quotient(dividend: int, divisor: int) -> int | None:
    """Return a size divided by a positive number, rounded down; None where that is no size.

    Equal quotients are equal sizes wherever the dividends differ by multiples of the divisor, in a common factor, or in
    the direction of rounding: ``-(-length//4)`` is ``(length+3)//4``, and ``length//2`` is ``length-(length+1)//2``.
    """
    nested = [term for term in _terms(dividend) if _has_quotient(term)]
    match nested:
        case [(1 | -1 as sign, ((Quotient() as inner, 1),))]:
            # (x // m + y) // k is (x + m y) // (m k), and -(x // m) is (m - 1 - x) // m.
            others = sum_of([term for term in _terms(dividend) if term not in nested])
            numerator = inner.dividend if sign == 1 else inner.divisor - 1 - inner.dividend
            return quotient(numerator + others * inner.divisor, inner.divisor * divisor)
        case _:
            pass
    exact: list[tuple[int, Monomial]] = []
    rest: list[tuple[int, Monomial]] = []
    constant = 0
    for coefficient, monomial in _terms(dividend):
        times, remainder = divmod(coefficient, divisor)
        if _has_quotient((1, monomial)) and (2 * remainder, -coefficient) > (divisor, 0):
            times, remainder = times + 1, remainder - divisor
        if not monomial:
            constant = remainder
        elif remainder:
            rest.append((remainder, monomial))
        exact.append((times, monomial))
    if not rest:
        return sum_of(exact)
    if any(map(_has_quotient, rest)):
        left = sum_of([*rest, (constant, ())])
        rounded = None if left == dividend else quotient(left, divisor)
        return None if rounded is None else sum_of(exact) + rounded
    common = math.gcd(divisor, *(coefficient for coefficient, _ in rest))
    divisor, constant = divisor // common, constant // common
    rest = sorted(((c // common, monomial) for c, monomial in rest), key=_order)
    leading = rest[0][0]
    if (2 * leading, divisor - 1) > (divisor, 2 * constant):
        # x // k is -((k - 1 - x) // k)
        rounded = quotient(divisor - 1 - sum_of([*rest, (constant, ())]), divisor)
        return None if rounded is None else sum_of(exact) - rounded
    left = sum_of([*rest, (constant, ())])
    assert isinstance(left, Size)
    lowest, highest = _value(left.terms, minimum) // divisor, left.at_bound // divisor
    if lowest == highest:
        return sum_of(exact) + lowest
    return sum_of([*exact, (1, ((Quotient(left, divisor), 1),))])


def common_divisor(size: Size) -> int | None:
    """Return a number by whose remainders a size is a polynomial without quotients each; None where it is one."""
    divisors = [factor.divisor for factor in size.factors if isinstance(factor, Quotient)]
    return math.lcm(*divisors) if divisors else None


def substituted(terms: Terms, value_of: Callable[[Factor], int]) -> int:
    """Return the size with other sizes in the place of factors."""
    total: int = 0
    for coefficient, monomial in terms:
        product: int = coefficient
        for factor, power in monomial:
            value = value_of(factor)
            for _ in range(power):
                product = value * product
        total = product + total
    return total


def _negated(terms: Terms) -> Terms:
    return tuple((-coefficient, monomial) for coefficient, monomial in terms)


def _has_quotient(term: tuple[int, Monomial]) -> bool:
    return any(isinstance(factor, Quotient) for factor, _ in term[1])


def minimum(dim: Dim) -> int:
    """Return the smallest value of a dim."""
    return dim.minimum


def maximum(dim: Dim) -> int:
    """Return the largest value of a dim."""
    return dim.maximum


def _value(terms: Terms, value_of: Callable[[Dim], int]) -> int:
    return sum(
        coefficient
        * math.prod(factor_value(factor, value_of) ** power for factor, power in monomial)
        for coefficient, monomial in terms
    )


def factor_value(factor: Factor, value_of: Callable[[Dim], int]) -> int:
    """Return the value of a factor where dims have these values."""
    if isinstance(factor, Dim):
        return value_of(factor)
    return _value(factor.dividend.terms, value_of) // factor.divisor


def _replaced(factor: Factor, values: Mapping[Dim, int]) -> int:
    if isinstance(factor, Dim):
        return values.get(factor, factor.size)
    rounded = quotient(factor.dividend.replaced(values), factor.divisor)
    assert rounded is not None  # only a quotient of a quotient is none
    return rounded


def _terms(value: int) -> Terms:
    if isinstance(value, Size):
        return value.terms
    return ((value, ()),) if value else ()


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for dim, power in right:
        powers[dim] = powers.get(dim, 0) + power
    return monomial_of(powers)


def monomial_of(powers: Mapping[Factor, int]) -> Monomial:
    """Return a product of factors with these powers."""
    present = [(factor, power) for factor, power in powers.items() if power]
    return tuple(sorted(present, key=lambda item: item[0].name))


def sum_of(terms: Sequence[tuple[int, Monomial]]) -> int:
    """Return the sum of products, a plain integer where no dim is left.

    Raises:
        UserError: where it is larger than the sizes of any model.
    """
    by_monomial: dict[Monomial, int] = {}
    for coefficient, monomial in terms:
        by_monomial[monomial] = by_monomial.get(monomial, 0) + coefficient
    left = [(coefficient, monomial) for monomial, coefficient in by_monomial.items() if coefficient]
    if not any(monomial for _, monomial in left):
        return sum(coefficient for coefficient, _ in left)
    is_small = len(left) <= _MOST_TERMS and all(
        abs(coefficient) <= _LARGEST_COEFFICIENT and degree_of(monomial) <= _LARGEST_DEGREE
        for coefficient, monomial in left
    )
    if not is_small:
        raise UserError(
            f"A size that depends on dims is a sum of more than {_MOST_TERMS} products, or has one of more than "
            f"{_LARGEST_DEGREE} dims or with a larger factor than {_LARGEST_COEFFICIENT}: give fewer dims to the batch."
        )
    return _size(tuple(sorted(left, key=_order)))


_MOST_TERMS: Final = 500
_LARGEST_DEGREE: Final = 32
_LARGEST_COEFFICIENT: Final = 10**18


def degree_of(monomial: Monomial) -> int:
    """Return the number of factors of a product."""
    return sum(power for _, power in monomial)


def _order(term: tuple[int, Monomial]) -> tuple[int, list[tuple[str, int]]]:
    """Put products of higher degree first."""
    return -degree_of(term[1]), [(dim.name, power) for dim, power in term[1]]
