"""Sizes that depend on dims: a program that has dims is for batches of many shapes.

A dim is a number of elements that each micro-batch has for itself, such as its length. Shapes, strides and numbers of
elements that depend on dims are polynomials in them. A ``Size`` is such a polynomial, and an integer: the polynomial's
value where each dim has its largest value. So whatever computes with integers computes at that bound, sums and products
keep the polynomial, and everything else (quotients, comparisons) is about the bound.

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

Monomial = tuple[tuple[Dim, int], ...]
"""The dims of a product with their powers, in the order of their names."""

Terms = tuple[tuple[int, Monomial], ...]
"""The products that a polynomial adds up, each with its coefficient; a constant has no dims."""


class Size(int):
    """A number of elements that depends on dims; see the module's docstring."""

    terms: Terms
    _hash: int

    def __new__(cls, terms: Terms) -> Size:
        size = super().__new__(cls, _value(terms, lambda dim: dim.maximum))
        size.terms = terms
        size._hash = hash(terms)
        return size

    def at(self, values: Mapping[str, int]) -> int:
        """Return the value where the dims have these values, by name."""
        return _value(self.terms, lambda dim: values[dim.name])

    def replaced(self, values: Mapping[Dim, int]) -> int:
        """Return the size where these dims are these sizes; a plain integer where no dim is left."""
        total = 0
        for coefficient, monomial in self.terms:
            product = coefficient
            for dim, power in monomial:
                for _ in range(power):
                    product = values.get(dim, dim.size) * product
            total = product + total
        return total

    @property
    def at_bound(self) -> int:
        """The value where each dim is as large as it may be, a plain integer."""
        return int.__add__(self, 0)

    @property
    def dims(self) -> frozenset[Dim]:
        """The dims that it depends on."""
        return frozenset(dim for _, monomial in self.terms for dim, _ in monomial)

    @property
    def multiple(self) -> Multiple | None:
        """The factor and the dim of a multiple of one dim; None of any other size."""
        match self.terms:
            case ((factor, ((dim, 1),)),):
                return Multiple(factor, dim)
            case _:
                return None

    @property
    def grows(self) -> bool:
        """Whether it is never negative and never shrinks where a dim grows, so that its bound is its largest value.

        Where coefficients are negative, the answer may be no for a polynomial that grows.
        """
        smallest = {dim.name: dim.minimum for dim in self.dims}
        return self.at(smallest) >= 0 and all(
            self._derivative_is_positive(dim) for dim in self.dims
        )

    def _derivative_is_positive(self, by: Dim) -> bool:
        """Return whether the derivative is positive where positive terms are smallest and negative ones largest."""
        lowest = 0
        for coefficient, monomial in self.terms:
            powers = dict(monomial)
            power = powers.pop(by, 0)
            if not power:
                continue
            product = coefficient * power
            for dim, exponent in ((by, power - 1), *powers.items()):
                product *= (dim.minimum if coefficient > 0 else dim.maximum) ** exponent
            lowest += product
        return lowest >= 0

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


class Multiple(NamedTuple):
    """A multiple of one dim, from whose value that of the dim follows."""

    factor: int
    dim: Dim

    def value_of_dim(self, number: int) -> int | None:
        """Return the dim's value where the multiple is ``number``; None where it has none in its range."""
        value, rest = divmod(number, self.factor)
        return value if not rest and self.dim.minimum <= value <= self.dim.maximum else None


# A program has few different sizes, and passes and proofs compute the same sums and products of them again and again.
_KEPT: Final = 1 << 14


@lru_cache(_KEPT)
def _size(terms: Terms) -> Size:
    """Return one and the same object for equal terms, so that comparisons are fast."""
    return Size(terms)


@lru_cache(_KEPT)
def _added(left: int, right: int) -> int:
    return _sum([*_terms(left), *_terms(right)])


@lru_cache(_KEPT)
def _multiplied(left: Size, right: int) -> int:
    return _sum([(a * b, _product(x, y)) for a, x in left.terms for b, y in _terms(right)])


@lru_cache(_KEPT)
def exact_quotient(size: Size, divisor: int) -> int | None:
    """Return the quotient if each product of the polynomial is a multiple of the divisor, which is one product."""
    if not divisor or len(_terms(divisor)) != 1:
        return None
    ((factor, powers_of_divisor),) = _terms(divisor)
    terms: list[tuple[int, Monomial]] = []
    for coefficient, monomial in size.terms:
        powers = dict(monomial)
        for dim, power in powers_of_divisor:
            powers[dim] = powers.get(dim, 0) - power
        if coefficient % factor or min(powers.values(), default=0) < 0:
            return None
        terms.append((coefficient // factor, _monomial(powers)))
    return _sum(terms)


def _value(terms: Terms, value_of: Callable[[Dim], int]) -> int:
    return sum(
        coefficient * math.prod(value_of(dim) ** power for dim, power in monomial)
        for coefficient, monomial in terms
    )


def _terms(value: int) -> Terms:
    if isinstance(value, Size):
        return value.terms
    return ((value, ()),) if value else ()


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for dim, power in right:
        powers[dim] = powers.get(dim, 0) + power
    return _monomial(powers)


def _monomial(powers: Mapping[Dim, int]) -> Monomial:
    present = [(dim, power) for dim, power in powers.items() if power]
    return tuple(sorted(present, key=lambda item: item[0].name))


def _sum(terms: Sequence[tuple[int, Monomial]]) -> int:
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
        abs(coefficient) <= _LARGEST_COEFFICIENT and _degree(monomial) <= _LARGEST_DEGREE
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


def _degree(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _order(term: tuple[int, Monomial]) -> tuple[int, list[tuple[str, int]]]:
    """Put products of higher degree first."""
    return -_degree(term[1]), [(dim.name, power) for dim, power in term[1]]


_FACTOR: Final = r"(?:[A-Za-z_][A-Za-z0-9_]*(?:\^[0-9]{1,2})?|[0-9]{1,30})"
SIZE_TEXT: Final = rf"-?{_FACTOR}(?:[*+-]{_FACTOR})*"
"""A size as ``str`` spells it."""

_SIZE: Final = re.compile(SIZE_TEXT)
_LONGEST_TEXT: Final = 20_000
"""The most characters of a size that ``parse_size`` reads; those of models have a few dozen."""

_TERM: Final = re.compile(r"([+-]?)([^+-]+)")


class UnknownDimError(ValueError):
    """A text names a dim that the program does not declare."""


def parse_size(text: str, dims: Mapping[str, Dim]) -> int | None:
    """Return the size that a text spells, None where it spells none; a plain integer where it names no dim.

    Raises:
        UnknownDimError: where it names another dim than these.
        UserError: where it spells a larger size than any model has.
    """
    if len(text) > _LONGEST_TEXT or _SIZE.fullmatch(text) is None:
        return None
    terms: list[tuple[int, Monomial]] = []
    for sign, product in _TERM.findall(text):
        coefficient = -1 if sign == "-" else 1
        powers: dict[Dim, int] = {}
        for factor in product.split("*"):
            name, _, power = factor.partition("^")
            if name.isdecimal():
                coefficient *= int(name)
            elif name in dims:
                powers[dims[name]] = powers.get(dims[name], 0) + int(power or 1)
            else:
                raise UnknownDimError(name)
        terms.append((coefficient, _monomial(powers)))
    return _sum(terms)
