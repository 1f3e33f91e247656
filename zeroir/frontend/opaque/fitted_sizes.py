"""Finds the polynomials of dims that sizes are, from their values for a few values of the dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Final

from zeroir.ir.sizes import Dim, Size, monomial_of, sum_of

Point = Mapping[Dim, int]
"""A value for each dim."""

_HIGHEST_DEGREE: Final = 2


def points_of(dims: Iterable[Dim]) -> list[Point]:
    """Return the values of dims for which a module is called: small ones first, the largest last."""
    every = sorted(dims, key=lambda dim: dim.name)

    def point(changes: Mapping[Dim, int]) -> Point:
        small = {dim: 2 + number + changes.get(dim, 0) for number, dim in enumerate(every)}
        return {dim: min(max(dim.minimum, size), dim.maximum) for dim, size in small.items()}

    found = [
        point({}),
        *(point({dim: step}) for dim in every for step in (1, 3)),
        *(
            point({first: 1, second: 1})
            for first, second in combinations_with_replacement(every, 2)
        ),
        {dim: dim.minimum for dim in every},
        {dim: dim.maximum for dim in every},
    ]
    return [at for number, at in enumerate(found) if at not in found[number + 1 :]]


def at_point(size: int, point: Point) -> int:
    """Return the value of a size."""
    return (
        size.at({dim.name: value for dim, value in point.items()})
        if isinstance(size, Size)
        else size
    )


def fitted(points: Sequence[Point], values: Sequence[int]) -> int | None:
    """Return the polynomial of the lowest degree with these values at the points; None where none has them all."""
    dims = list(points[0])
    for degree in range(_HIGHEST_DEGREE + 1):
        products = [
            product
            for count in range(degree + 1)
            for product in combinations_with_replacement(dims, count)
        ]
        rows = [[_value(product, point) for product in products] for point in points]
        factors = _solved(rows, values)
        if factors is not None and all(factor.denominator == 1 for factor in factors):
            return sum_of(
                [
                    (factor.numerator, monomial_of({dim: product.count(dim) for dim in product}))
                    for factor, product in zip(factors, products, strict=True)
                ]
            )
    return None


def _value(product: Sequence[Dim], point: Point) -> int:
    value = 1
    for dim in product:
        value *= point[dim]
    return value


def _solved(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Return a solution of linear equations, in which what they leave open is 0; None where there is none."""
    left = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    count = len(rows[0])
    solved: dict[int, list[Fraction]] = {}
    for column in range(count):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        pivot = [number / pivot[column] for number in pivot]
        for row in (*left, *solved.values()):
            factor = row[column]
            row[:] = [number - factor * other for number, other in zip(row, pivot, strict=True)]
        solved[column] = pivot
    if any(row[count] for row in left):
        return None
    return [solved[column][count] if column in solved else Fraction(0) for column in range(count)]
