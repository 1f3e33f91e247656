"""Sizes that depend on dims, as Inductor computes with them: symbols of torch that have the ranges of the dims.

Only processes that compile import this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sympy
import torch
from sympy.core.relational import Relational
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental import _config as config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges

from zeroir.ir.size_bounds import highest, lowest
from zeroir.ir.sizes import Dim, Factor, Size, exact_quotient, quotient


class SizesError(Exception):
    """The code of a segment would be right for some of its sizes only."""


class SymbolicSizes:
    """The symbols of dims; torch has questions about them while it traces and compiles."""

    def __init__(self, dims: Sequence[Dim]) -> None:
        self.env = _Symbols()
        self._symbols: dict[Dim, sympy.Symbol] = {}
        for dim in dims:
            symbol = self.env.create_symbol(
                dim.maximum,
                source=ConstantSource(dim.name),
                dynamic_dim=DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
            )
            assert isinstance(symbol, sympy.Symbol)
            self.env.var_to_range[symbol] = ValueRanges(dim.minimum, dim.maximum)
            self._symbols[dim] = symbol
            self.env.sizes[symbol] = dim.size

    def of(self, sizes: Sequence[int]) -> list[int | torch.SymInt]:
        """Return sizes as torch computes with them."""
        return [self._symint(size) if isinstance(size, Size) else size for size in sizes]

    @contextmanager
    def symbolic(self) -> Iterator[None]:
        """Let torch compute with symbols within the block, and take no size that is one for 1."""
        if not self._symbols:
            yield
            return
        was_oblivious = config.backed_size_oblivious
        config.backed_size_oblivious = True
        try:
            with enable_python_dispatcher():
                yield
        finally:
            config.backed_size_oblivious = was_oblivious

    def require_right_for_all(self) -> None:
        """Require that what torch was answered about the dims, and relies on, holds for all their values.

        That a size is not 1 is left out: torch asks for it to choose strides, and inserts no copy or broadcast where it
        is 1. The strides of a graph's inputs are declared, and code for other sizes follows them.

        Raises:
            SizesError: where something does not hold.
        """
        ranges = tuple((s, self.env.var_to_range[s]) for s in self._symbols.values())
        for guard in self.env.guards:
            holds = self.env._maybe_evaluate_static(guard.expr, axioms=(), var_to_range=ranges)
            if holds is not sympy.true and holds is not True and not self.env.is_not_1(guard.expr):
                names = {symbol: sympy.Symbol(dim.name) for dim, symbol in self._symbols.items()}
                raise SizesError(
                    f"Inductor's code would be right only where {guard.expr.xreplace(names)}."
                )

    def _symint(self, size: Size) -> int | torch.SymInt:
        return self.env.create_symintnode(self._expression(size), hint=int(size))

    def _expression(self, size: Size) -> sympy.Expr:
        products = (
            sympy.Mul(coefficient, *(self._factor(f) ** power for f, power in monomial))
            for coefficient, monomial in size.terms
        )
        return sympy.Add(*products)

    def _factor(self, factor: Factor) -> sympy.Expr:
        if isinstance(factor, Dim):
            return self._symbols[factor]
        return FloorDiv(self._expression(factor.dividend), sympy.Integer(factor.divisor))


class _Symbols(ShapeEnv):
    """Symbols of dims, which no answer narrows or replaces.

    ``sizes`` are the dims that the symbols stand for. What sympy cannot say of quotients, their polynomials do.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.sizes: dict[sympy.Symbol, Size] = {}

    def is_not_1(self, guard: sympy.Basic) -> bool:
        """Return whether a guard says no more than that a size is not 1, or is more than 1."""
        match guard:
            case sympy.Ne(args=(left, sympy.Integer() as right)):
                limit = int(right)
            case sympy.StrictGreaterThan(args=(left, sympy.Integer() as right)):
                limit = int(right)
            case sympy.GreaterThan(args=(left, sympy.Integer() as right)):
                limit = int(right) - 1
            case _:
                return False
        size = self._polynomial(left)
        # A multiple of a size is compared with that multiple of 1.
        return limit > 0 and isinstance(size, Size) and exact_quotient(size, limit) is not None

    def _maybe_evaluate_static(  # type: ignore[override] # torch caches its own
        self, expr: sympy.Basic, *args: object, **kwargs: object
    ) -> sympy.Basic | None:
        known = super()._maybe_evaluate_static(expr, *args, **kwargs)
        if known is not None or not isinstance(expr, Relational):
            return known
        left, right = self._polynomial(expr.lhs), self._polynomial(expr.rhs)
        if left is None or right is None:
            return None
        difference = left - right
        outcomes = {
            expr.func(sympy.Integer(end), 0) for end in (lowest(difference), highest(difference))
        }
        is_between = isinstance(expr, sympy.Eq | sympy.Ne) and isinstance(difference, Size)
        if is_between and lowest(difference) <= 0 <= highest(difference):
            return None
        return outcomes.pop() if len(outcomes) == 1 else None

    def _polynomial(self, expression: sympy.Basic) -> int | None:
        """Return the size that an expression of torch means; None where it is no polynomial of dims."""
        match expression:
            case sympy.Integer():
                return int(expression)
            case sympy.Symbol():
                return self.sizes.get(expression)
            case sympy.Pow(args=(base, sympy.Integer() as power)) if power > 0:
                parts = [self._polynomial(base)] * int(power)
            case sympy.Add() | sympy.Mul() | FloorDiv() | Mod() | PythonMod() | Max() | Min():
                parts = [self._polynomial(part) for part in expression.args]
            case _:
                return None
        sizes = [part for part in parts if part is not None]
        if len(sizes) < len(parts):
            return None
        match expression:
            case sympy.Add():
                return sum(sizes[1:], sizes[0])
            case FloorDiv():
                return _quotient(*sizes)
            case Mod() | PythonMod():
                dividend, divisor = sizes
                rounded = _quotient(dividend, divisor)
                return None if rounded is None else dividend - rounded * divisor
            case Max() | Min():
                sign = 1 if isinstance(expression, Max) else -1
                return next(
                    (a for a in sizes if all(lowest(sign * (a - b)) >= 0 for b in sizes)), None
                )
            case _:
                return math.prod(sizes[1:], start=sizes[0])

    def _refine_ranges(self, expr: sympy.Expr) -> None:
        del expr

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        del a, tgt, msg


def _quotient(dividend: int, divisor: int) -> int | None:
    """Return a quotient that is rounded down; None where it is no size."""
    if isinstance(divisor, Size):
        return exact_quotient(dividend, divisor) if isinstance(dividend, Size) else None
    return quotient(dividend, divisor) if divisor > 0 else None
