"""The part of torch that spells questions about sizes: their answers for each value of the dims, one by one.

What is true of quotients and remainders follows from no bounds of theirs, but dims have few values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, cast

import sympy
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

_MOST_VALUES: Final = 1 << 15

_LARGEST_MODULUS: Final = 64

_SIGNS: Final[Mapping[type[sympy.Basic], str]] = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
    sympy.Add: "+",
    sympy.Mul: "*",
    sympy.And: "and",
    sympy.Or: "or",
    FloorDiv: "//",
    CleanDiv: "//",
    Mod: "%",
    PythonMod: "%",
}


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
    function = _function(question, symbols)
    if function is None:
        return None
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


@lru_cache(1 << 10)
def _function(
    question: sympy.Basic, symbols: Sequence[sympy.Symbol]
) -> Callable[..., object] | None:
    names = {symbol: f"x{index}" for index, symbol in enumerate(symbols)}
    text = _text(question, names)
    if text is None:
        return None
    function = eval(f"lambda {', '.join(names.values())}: {text}")  # noqa: S307 - made of names and numbers alone
    return cast("Callable[..., object]", function)


def _text(expression: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str | None:
    """Return an expression as Python computes it; None where that is not known."""
    match expression:
        case sympy.Integer():
            return f"({int(expression)})"
        case sympy.Symbol():
            return names.get(expression)
        case sympy.logic.boolalg.BooleanAtom():
            return str(bool(expression))
        case _:
            pass
    parts = [_text(part, names) for part in expression.args]
    if not parts or None in parts:
        return None
    texts = cast("list[str]", parts)
    match expression:
        case sympy.Not():
            return f"(not {texts[0]})"
        case Max() | Min():
            return f"{'max' if isinstance(expression, Max) else 'min'}({', '.join(texts)})"
        case sympy.Pow(args=(_, sympy.Integer() as power)) if power > 0:
            return f"({texts[0]} ** {texts[1]})"
        case _:
            sign = _SIGNS.get(type(expression))
            return None if sign is None else f"({f' {sign} '.join(texts)})"
