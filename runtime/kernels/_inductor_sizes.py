"""Sizes that depend on dims, as Inductor computes with them: symbols of torch that have the ranges of the dims.

Only processes that compile import this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
from zeroir.ir.sizes import Dim, Factor, Size, exact_quotient, quotient, sum_of


class SizesError(Exception):
    """The code of a segment would be right for some of its sizes only."""


def size_of(size: int | torch.SymInt) -> int:
    """Return a size that torch computed from dims, as a polynomial of these where torch has it so.

    Raises:
        SizesError: where it is none.
    """
    if not isinstance(size, torch.SymInt):
        return size
    symbols = symbols_of([size])
    polynomial = None if symbols is None else symbols.polynomial(size.node.expr)
    if polynomial is None:
        raise SizesError(f"The size {size} is no polynomial of dims.")
    return polynomial


def symbols_of(sizes: Iterable[int | torch.SymInt]) -> Symbols | None:
    """Return the symbols that occur in sizes; None where there are none."""
    found = (size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))
    return next((symbols for symbols in found if isinstance(symbols, Symbols)), None)


class Symbols(ShapeEnv):
    """The symbols of dims, which no answer narrows or replaces. Torch asks questions about them while it compiles.

    What sympy cannot say of quotients, their polynomials do.
    """

    def __init__(self, dims: Sequence[Dim]) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self._symbols: dict[Dim, sympy.Symbol] = {}
        self._dims: dict[sympy.Symbol, Dim] = {}
        for dim in dims:
            symbol = self.create_symbol(
                dim.maximum,
                source=ConstantSource(dim.name),
                dynamic_dim=DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
            )
            assert isinstance(symbol, sympy.Symbol)
            self.var_to_range[symbol] = ValueRanges(dim.minimum, dim.maximum)
            self._symbols[dim], self._dims[symbol] = symbol, dim

    def of(self, sizes: Sequence[int]) -> list[int | torch.SymInt]:
        """Return sizes as torch computes with them."""
        return [self._symint(size) if isinstance(size, Size) else size for size in sizes]

    @contextmanager
    def in_use(self) -> Iterator[None]:
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
        ranges = tuple((symbol, self.var_to_range[symbol]) for symbol in self._dims)
        for guard in self.guards:
            holds = self._maybe_evaluate_static(guard.expr, axioms=(), var_to_range=ranges)
            if holds is not sympy.true and holds is not True and not self._is_not_1(guard.expr):
                names = {symbol: sympy.Symbol(dim.name) for symbol, dim in self._dims.items()}
                raise SizesError(
                    f"Inductor's code would be right only where {guard.expr.xreplace(names)}."
                )

    def _symint(self, size: Size) -> int | torch.SymInt:
        return self.create_symintnode(self._expression(size), hint=int(size))

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

    def _is_not_1(self, guard: sympy.Basic) -> bool:
        """Return whether a guard says no more than that some size is not 1, or is more than 1."""
        if not isinstance(guard, Relational):
            return False
        left, right = self.polynomial(guard.lhs), self.polynomial(guard.rhs)
        if left is None or right is None:
            return False
        match guard:
            case sympy.Ne():
                return _is_1_where_equal(left, right) or _is_1_where_equal(right, left)
            case sympy.StrictGreaterThan():
                return _is_1_where_equal(left, right)
            case sympy.GreaterThan():
                return _is_1_where_equal(left, right - 1)
            case sympy.StrictLessThan():
                return _is_1_where_equal(right, left)
            case sympy.LessThan():
                return _is_1_where_equal(right, left - 1)
            case _:
                return False

    def _maybe_evaluate_static(  # type: ignore[override] # torch caches its own
        self, expr: sympy.Basic, *args: object, **kwargs: object
    ) -> sympy.Basic | None:
        known = super()._maybe_evaluate_static(expr, *args, **kwargs)
        return self._known(expr) if known is None else known

    def _known(self, question: sympy.Basic) -> sympy.Basic | None:
        """Return the answer to a question for all values of dims; None where it has several, or none is known."""
        if isinstance(question, sympy.Or):
            answers = [self._known(part) for part in question.args]
            return sympy.true if sympy.true in answers else None
        if not isinstance(question, Relational):
            return None
        left, right = self.polynomial(question.lhs), self.polynomial(question.rhs)
        if left is None or right is None:
            return None
        least, most = lowest(left - right), highest(left - right)
        if least < most and least <= 0 <= most and isinstance(question, sympy.Eq | sympy.Ne):
            return None
        at_ends = {question.func(sympy.Integer(end), 0) for end in (least, most)}
        return at_ends.pop() if len(at_ends) == 1 else None

    def polynomial(self, expression: sympy.Basic) -> int | None:
        """Return the size that an expression of torch means; None where it is no polynomial of dims."""
        match expression:
            case sympy.Integer():
                return int(expression)
            case sympy.Symbol():
                dim = self._dims.get(expression)
                return None if dim is None else dim.size
            case sympy.Pow(args=(base, sympy.Integer() as power)) if power > 0:
                parts = [self.polynomial(base)] * int(power)
            case sympy.Add() | sympy.Mul() | FloorDiv() | Mod() | PythonMod() | Max() | Min():
                parts = [self.polynomial(part) for part in expression.args]
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


def _is_1_where_equal(larger: int, smaller: int) -> bool:
    """Return whether the first polynomial is a multiple of a size, and the second that multiple of 1."""
    if not isinstance(larger, Size):
        return False
    if smaller > 0 and not isinstance(smaller, Size):
        return exact_quotient(larger, smaller) is not None
    excess = larger - smaller
    if isinstance(excess, Size):
        for factor in excess.factors:
            times = exact_quotient(excess, sum_of([(1, ((factor, 1),)), (-1, ())]))
            if times is not None and lowest(times) > 0:
                return True
    return False


def _quotient(dividend: int, divisor: int) -> int | None:
    """Return a quotient that is rounded down; None where it is no size."""
    if isinstance(divisor, Size):
        return exact_quotient(dividend, divisor) if isinstance(dividend, Size) else None
    return quotient(dividend, divisor) if divisor > 0 else None
