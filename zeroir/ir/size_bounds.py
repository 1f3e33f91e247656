"""Numbers that sizes are never less and never more than, and whether they grow where a dim grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from zeroir.ir.sizes import (
    MOST_KEPT,
    Dim,
    Factor,
    Monomial,
    Quotient,
    Size,
    Terms,
    degree_of,
    factor_value,
    maximum,
    minimum,
    monomial_of,
    substituted,
    sum_of,
)


@lru_cache(MOST_KEPT)
def grows(size: Size) -> bool:
    """Return whether a size is never negative and never shrinks where a dim grows; then its bound is its largest value.

    Where coefficients are negative, the answer may be no for a polynomial that grows.
    """
    return lowest(size) >= 0 and any(
        all(_least_slope(same, factor) >= 0 for factor in same.factors)
        for same in (size, _with_quotients_added(size))
    )


@lru_cache(MOST_KEPT)
def lowest(size: int) -> int:
    """Return a number that a size is never less than."""
    if not isinstance(size, Size):
        return size
    scaled, scale = _below(size.terms)
    # The terms of each are least at values of their own, so none of the numbers is always the best one.
    others = (size, _with_quotients_added(size))
    return max(*map(_lowest, others), -(-_lowest(scaled) // scale))


def highest(size: int) -> int:
    """Return a number that a size is never more than."""
    return -lowest(-size)


def _least_slope(size: Size, by: Factor) -> int:
    """Return a number that the derivative by a factor is never less than."""
    terms: list[tuple[int, Monomial]] = []
    for coefficient, monomial in size.terms:
        powers = dict(monomial)
        power = powers.get(by, 0)
        if power:
            terms.append((coefficient * power, monomial_of({**powers, by: power - 1})))
    return _lowest(sum_of(terms))


@lru_cache(MOST_KEPT)
def _lowest(size: int) -> int:
    """Return a number that a size is never less than if its factors have any values of their ranges."""
    if not isinstance(size, Size):
        return size
    degree = max(degree_of(monomial) for _, monomial in size.terms)
    ends: dict[Factor, Callable[[Dim], int]] = {}
    if math.comb(len(size.factors) + degree, degree) <= _MOST_DERIVATIVES:
        negated = -size
        assert isinstance(negated, Size)
        ends = {factor: minimum for factor in size.factors if _least_slope(size, factor) >= 0}
        ends |= {factor: maximum for factor in size.factors if _least_slope(negated, factor) >= 0}
    total = 0
    for coefficient, monomial in size.terms:
        # With other factors it may grow and shrink, so each product has the end where that product is least.
        end = minimum if coefficient > 0 else maximum
        total += coefficient * math.prod(
            factor_value(factor, ends.get(factor, end)) ** power for factor, power in monomial
        )
    return total


def _below(terms: Terms) -> tuple[int, int]:
    """Return a polynomial of dims alone and a number: the one divided by the other is never more than the terms.

    A quotient ``x // k`` is at least ``(x - k + 1) / k``, which may be negative, and at most ``x / k``.
    """
    scale = math.lcm(
        *(
            math.prod(
                factor.divisor**power for factor, power in monomial if isinstance(factor, Quotient)
            )
            for _, monomial in terms
        )
    )
    total: int = 0
    for coefficient, monomial in terms:
        degree = sum(power for factor, power in monomial if isinstance(factor, Quotient))
        if coefficient > 0 and degree > 1:
            continue  # a product of two negative numbers would be too large
        product: int = coefficient * scale
        for factor, power in monomial:
            for _ in range(power):
                if isinstance(factor, Dim):
                    product = factor.size * product
                    continue
                slack = factor.divisor - 1 if coefficient > 0 else 0
                product = (factor.dividend - slack) * (product // factor.divisor)
        total = product + total
    return total, scale


def _with_quotients_added(size: Size) -> Size:
    """Return an equal size without the quotients with which it shrinks: ``x // k`` is ``-((k - 1 - x) // k)``."""
    others: dict[Factor, int] = {}
    for factor in size.factors:
        if isinstance(factor, Dim) or _least_slope(size, factor) >= 0:
            continue
        k = factor.divisor
        negated = [*((-c, m) for c, m in factor.dividend.terms), (k - 1, ())]
        rest = sum_of([(c % k, m) for c, m in negated if m] + [(_constant(negated) % k, ())])
        assert isinstance(rest, Size)  # no coefficient of the dividend is a multiple of the divisor
        exact = [(c // k, m) for c, m in negated if m] + [(_constant(negated) // k, ())]
        others[factor] = -sum_of([*exact, (1, ((Quotient(rest, k), 1),))])
    changed = substituted(
        size.terms, lambda factor: others.get(factor, sum_of([(1, ((factor, 1),))]))
    )
    return changed if isinstance(changed, Size) else size


def _constant(terms: Sequence[tuple[int, Monomial]]) -> int:
    return sum(coefficient for coefficient, monomial in terms if not monomial)


_MOST_DERIVATIVES: Final = 2000
"""A polynomial of many factors has so many partial derivatives that its ends are not looked for."""
