"""The part of torch that spells questions about sizes: their answers for each value of the dims, one by one.

What is true of quotients and remainders follows from no bounds of theirs, but dims have few values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, cast

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

_MOST_VALUES: Final = 1 << 15

_LARGEST_MODULUS: Final = 64

_FUNCTIONS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "CleanDiv": operator.floordiv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
"""Torch's functions of sizes, as Python computes them."""

_EXACT: Final = (sympy.Integer, sympy.Symbol, sympy.logic.boolalg.BooleanAtom)
"""The parts of questions about integers alone."""


def holds_for_each(
    question: sympy.Basic, values: Mapping[sympy.Symbol, tuple[int, int]]
) -> bool | None:
    """Return whether something is true for all values of symbols, each from one number to another one, both included.

    None where there are too many, or it is not known how to compute it.
    """
    symbols = tuple(sorted(values, key=str))
    ranges = [range(values[symbol][0], values[symbol][1] + 1) for symbol in symbols]
    if math.prod(map(len, ranges)) > _MOST_VALUES:
        return None
    if not _is_exact(question):
        return None
    function = _function(question, symbols)
    try:
        return all(function(*each) for each in product(*ranges))
    except ZeroDivisionError:
        return False


def modulus_of(question: sympy.Basic) -> int | None:
    """Return the number by whose remainders a question may have one answer for each; None without a small one."""
    divisors = [
        int(part.args[1])
        for part in question.atoms(FloorDiv, Mod, PythonMod)
        if isinstance(part.args[1], sympy.Integer)
    ]
    modulus = math.lcm(*divisors)
    return modulus if 1 < modulus <= _LARGEST_MODULUS else None


def _is_exact(question: sympy.Basic) -> bool:
    """Return whether integers alone answer a question, by functions that are known."""
    return (
        all(isinstance(atom, _EXACT) for atom in question.atoms())
        and all(power.exp.is_positive for power in question.atoms(sympy.Pow))
        and all(
            isinstance(each, Max | Min) or type(each).__name__ in _FUNCTIONS
            for each in question.atoms(sympy.Function)
        )
    )


@lru_cache(1 << 10)
def _function(question: sympy.Basic, symbols: Sequence[sympy.Symbol]) -> Callable[..., bool]:
    return cast("Callable[..., bool]", sympy.lambdify(symbols, question, [_FUNCTIONS]))
