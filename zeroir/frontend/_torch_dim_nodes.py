"""The part of torch that computes with sizes: its nodes, as polynomials of dims instead of expressions of sympy.

Torch calls a node for each sum, product and comparison of sizes, several dozen times for each operator. A ``DimNode``
is one polynomial, and answers comparisons from the ranges of dims. What no polynomial says, such as the quotient of two
dims or a comparison that the ranges leave open, is an expression of sympy, as torch itself has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Final, Literal
from unittest import mock

import sympy
from torch import SymFloat, SymInt
from torch._subclasses._fake_tensor_utils import _DeconstructedSymNode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.types import IntLikeType, PySymType
from torch.utils._sympy.functions import (
    FloorDiv,
    OpaqueUnaryFn_exp,
    OpaqueUnaryFn_log,
    OpaqueUnaryFn_log2,
    OpaqueUnaryFn_sqrt,
)

from zeroir.ir.segments.size_numbers import SizeNumber
from zeroir.ir.size_bounds import highest, lowest
from zeroir.ir.sizes import Dim, Factor, Size, exact_quotient, quotient

Relation = Literal["eq", "ne", "lt", "le", "gt", "ge"]


class PolynomialEnv(ShapeEnv):
    """The nodes of all polynomials of dims: one for each, so that equal ones are the same object."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.symbols: dict[Dim, sympy.Symbol] = {}
        self.hints: dict[str, int] = {}
        self._nodes: dict[int, DimNode] = {}
        self._by_expression: dict[sympy.Expr, DimNode | None] = {}
        self._comparisons: dict[tuple[Relation, int, int], SymNode] = {}
        self._truths = (Truth(self, False), Truth(self, True))

    def node(self, size: int) -> DimNode:
        """Return the node of a size."""
        node = self._nodes.get(size)
        if node is None:
            node = self._nodes[size] = DimNode(self, size)
        return node

    def symint(self, size: int) -> IntLikeType:
        """Return a size as torch computes with it."""
        return self.node(size).symint if isinstance(size, Size) else size

    def node_of(self, expression: sympy.Expr) -> DimNode | None:
        """Return the node of an expression of sympy, None where it is no polynomial."""
        if expression not in self._by_expression:
            size = self.polynomial(expression)
            self._by_expression[expression] = None if size is None else self.node(size)
        return self._by_expression[expression]

    def polynomial(self, expression: sympy.Expr) -> int | None:
        """Return the size that an expression of sympy means, None where it is no polynomial of dims."""
        raise NotImplementedError

    def truth(self, value: bool) -> Truth:
        """Return the node of an answer that is the same for all values of dims."""
        return self._truths[value]

    def compared(self, relation: Relation, left: DimNode, right: DimNode) -> SymNode:
        """Return whether two sizes are in this relation: a ``Truth``, or a question to torch."""
        key = relation, left.size, right.size
        node = self._comparisons.get(key)
        if node is None:
            node = self._comparisons[key] = self._compared(relation, left, right)
        return node

    def _compared(self, relation: Relation, left: DimNode, right: DimNode) -> SymNode:
        answer = answer_for_all(relation, left.size, right.size)
        if answer is None:
            expression = _RELATIONS[relation](left.expr, right.expr)
            if expression not in (sympy.true, sympy.false):
                hint = _compares(relation, left.hint, right.hint)
                return SymNode(expression, self, bool, hint)
            answer = expression is sympy.true
        return self.truth(answer)


class DimNode(SymNode):
    """An integer that is a polynomial of dims, or a plain one."""

    shape_env: PolynomialEnv
    constant: int | None

    def __init__(self, env: PolynomialEnv, size: int) -> None:
        # Torch's own constructor computes with sympy.
        is_plain = not isinstance(size, Size)
        self.shape_env = env
        self.size = size
        self.pytype = int
        self.constant = size if is_plain else None
        self.fx_node = None
        self._hint = size.at(env.hints) if isinstance(size, Size) else size

    @property
    def symint(self) -> SymInt:
        """The integer of torch that has this node."""
        make: Callable[[SymNode], SymInt] = SymInt
        return make(self)

    @cached_property
    def _expr(self) -> sympy.Expr:  # type: ignore[override]
        if not isinstance(self.size, Size):
            return sympy.Integer(self.size)
        products = (
            sympy.Mul(coefficient, *(self._factor(f) ** power for f, power in monomial))
            for coefficient, monomial in self.size.terms
        )
        return sympy.Add(*products)

    def _factor(self, factor: Factor) -> sympy.Expr:
        if isinstance(factor, Dim):
            return self.shape_env.symbols[factor]
        dividend = self.shape_env.node(factor.dividend).expr
        return FloorDiv(dividend, sympy.Integer(factor.divisor))

    @property
    def expr(self) -> sympy.Expr:
        return self._expr

    def _value_eq(self, other: SymNode) -> bool:
        return self is other

    def _value_hash(self) -> int:
        return hash(self.size)

    def maybe_as_int(self) -> int | None:
        return self.constant

    def is_int(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def wrap_int(self, num: int) -> DimNode:
        return self.shape_env.node(num)

    def wrap_bool(self, num: bool) -> Truth:
        return self.shape_env.truth(num)

    def guard_int(self, file: str, line: int) -> int:
        return super().guard_int(file, line) if self.constant is None else self.constant

    def neg(self) -> SymNode:
        return self.shape_env.node(-self.size)

    def add(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode or abs(other.size) > _LARGEST:
            return super().add(other)
        return self.shape_env.node(self.size + other.size)

    def sub(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode or abs(other.size) > _LARGEST:
            return super().sub(other)
        return self.shape_env.node(self.size - other.size)

    def mul(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode or abs(other.size) > _LARGEST:
            return super().mul(other)
        return self.shape_env.node(self.size * other.size)

    def sym_sum(self, args: list[SymNode]) -> SymNode:
        total: int = 0
        for arg in args:
            if type(arg) is not DimNode:
                return super().sym_sum(args)
            total = total + arg.size
        return self.shape_env.node(total)

    def int_floordiv(self, other: SymNode) -> SymNode:
        quotient = self._quotient(other)
        return super().int_floordiv(other) if quotient is None else self.shape_env.node(quotient)

    def int_truediv(self, other: SymNode) -> SymNode:
        ratio = super().int_truediv(other)
        return ratio if type(other) is not DimNode else Ratio(self, other, ratio)

    def sym_float(self) -> SymNode:
        return NumberNode(SizeNumber("float", (self.size,)), super().sym_float())

    def mod(self, other: SymNode) -> SymNode:
        quotient = self._quotient(other)
        if quotient is None or type(other) is not DimNode:
            return super().mod(other)
        return self.shape_env.node(self.size - quotient * other.size)

    def _quotient(self, other: SymNode) -> int | None:
        if type(other) is not DimNode or not isinstance(self.size, Size):
            return None
        return rounded_quotient(self.size, other.size)

    def sym_max(self, other: SymNode) -> SymNode:
        if type(other) is DimNode:
            is_larger = answer_for_all("ge", self.size, other.size)
            if is_larger is not None:
                return self if is_larger else other
        return super().sym_max(other)

    def sym_min(self, other: SymNode) -> SymNode:
        if type(other) is DimNode:
            is_smaller = answer_for_all("le", self.size, other.size)
            if is_smaller is not None:
                return self if is_smaller else other
        return super().sym_min(other)

    def eq(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().eq(other)
        return self.shape_env.compared("eq", self, other)

    def ne(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().ne(other)
        return self.shape_env.compared("ne", self, other)

    def lt(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().lt(other)
        return self.shape_env.compared("lt", self, other)

    def le(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().le(other)
        return self.shape_env.compared("le", self, other)

    def gt(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().gt(other)
        return self.shape_env.compared("gt", self, other)

    def ge(self, other: SymNode) -> SymNode:
        if type(other) is not DimNode:
            return super().ge(other)
        return self.shape_env.compared("ge", self, other)


class NumberNode(SymNode):
    """A number that is computed of sizes, and how it is."""

    def __init__(self, number: float, value: SymNode) -> None:
        super().__init__(
            value.expr, value.shape_env, value.pytype, value.hint, constant=value.constant
        )
        self.number = number

    def sym_float(self) -> SymNode:
        return self

    def neg(self) -> SymNode:
        return NumberNode(SizeNumber("neg", (self.number,)), super().neg())

    def add(self, other: SymNode) -> SymNode:
        return self._with("add", other, super().add(other))

    def sub(self, other: SymNode) -> SymNode:
        return self._with("sub", other, super().sub(other))

    def mul(self, other: SymNode) -> SymNode:
        return self._with("mul", other, super().mul(other))

    def float_truediv(self, other: SymNode) -> SymNode:
        return self._with("div", other, super().float_truediv(other))

    def float_pow(self, other: SymNode) -> SymNode:
        return self._with("pow", other, super().float_pow(other))

    def wrap_float(self, num: float) -> SymNode:
        return NumberNode(num, super().wrap_float(num))

    def _with(self, function: str, other: SymNode, value: SymNode) -> SymNode:
        if not isinstance(other, NumberNode):
            return value
        return NumberNode(SizeNumber(function, (self.number, other.number)), value)


class Ratio(NumberNode):
    """A size divided by another one, or by a plain number, and not rounded, as it is before ``math.ceil``."""

    def __init__(self, dividend: DimNode, divisor: DimNode, value: SymNode) -> None:
        super().__init__(SizeNumber("div", (dividend.size, divisor.size)), value)
        self._dividend, self._divisor = dividend, divisor.constant or 0

    def floor(self) -> SymNode:
        rounded = rounded_quotient(self._dividend.size, self._divisor)
        return super().floor() if rounded is None else self._dividend.shape_env.node(rounded)

    def ceil(self) -> SymNode:
        negated = rounded_quotient(-self._dividend.size, self._divisor)
        return super().ceil() if negated is None else self._dividend.shape_env.node(-negated)


class Truth(SymNode):
    """An answer that is the same for all values of dims."""

    constant: bool

    def __init__(self, env: PolynomialEnv, value: bool) -> None:
        super().__init__(sympy.true if value else sympy.false, env, bool, value, constant=value)

    def maybe_as_bool(self) -> bool:
        return self.constant

    def evaluate(self, size_oblivious: bool = False) -> bool:
        del size_oblivious
        return self.constant

    def expect_true(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def guard_or_false(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def guard_or_true(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def statically_known_true(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def sym_not(self) -> SymNode:
        assert isinstance(self.shape_env, PolynomialEnv)
        return self.shape_env.truth(not self.constant)

    def and_(self, other: SymNode) -> SymNode:
        return other if self.constant else self

    def or_(self, other: SymNode) -> SymNode:
        return self if self.constant else other


@contextmanager
def sizes_as_nodes() -> Iterator[None]:
    """Let torch make nodes of polynomials within the block where it would compute with expressions of sympy.

    The cache of fake tensors keeps sizes as expressions, and the tracer adds nodes to its graph for each part of one.
    """
    extract = _DeconstructedSymNode.extract
    build = proxy_tensor._build_proxy_for_sym_expr

    def node_of(self: _DeconstructedSymNode, shape_env: ShapeEnv) -> SymNode:
        node: SymNode | None = None
        if isinstance(shape_env, PolynomialEnv) and self.pytype is int:
            node = shape_env.node_of(self._expr)
        return extract(self, shape_env) if node is None else node

    def add_number(
        tracer: proxy_tensor._ProxyTracer, expr: sympy.Expr, out: PySymType | None = None
    ) -> object:
        if out is None:
            return build(tracer, expr, out)
        proxy_tensor._sym_register(tracer, _number, (), out)  # type: ignore[arg-type]
        return out

    of_sizes = {name: _of_sizes(name, getattr(math, name)) for name in _OPAQUE}
    with (
        mock.patch.object(_DeconstructedSymNode, "extract", node_of),
        mock.patch.object(proxy_tensor, "_build_proxy_for_sym_expr", add_number),
        mock.patch.dict(vars(math), of_sizes),
    ):
        yield


def _of_sizes(name: str, of_math: Callable[..., object]) -> Callable[..., object]:
    """Return a function of ``math`` that computes with sizes, too, of which it would make plain numbers."""

    def compute(*args: object) -> object:
        node = args[0].node if len(args) == 1 and isinstance(args[0], SymInt | SymFloat) else None
        if not isinstance(node, DimNode | NumberNode) or node.constant is not None:
            return of_math(*args)
        env = node.shape_env
        assert isinstance(env, PolynomialEnv)
        number = SizeNumber(name, (node.size if isinstance(node, DimNode) else node.number,))
        value = SymNode(_OPAQUE[name](node.expr), env, float, number.at(env.hints))
        make: Callable[[SymNode], SymFloat] = SymFloat
        return make(NumberNode(number, value))

    return compute


def _number() -> int:
    """Stand for a size in a graph, where its users find it as the value of their argument."""
    raise NotImplementedError


def answer_for_all(relation: Relation, left: int, right: int) -> bool | None:
    """Return whether two sizes are in this relation for all values of dims; None where these may differ."""
    if isinstance(left, Size) and isinstance(right, Size):
        lowest, highest = _ends(left - right)
    else:
        # Of a plain integer there may be more than sizes have, such as the end of a slice.
        lowest = _ends(left)[0] - _ends(right)[1]
        highest = _ends(left)[1] - _ends(right)[0]
    match relation:
        case "eq" | "ne":
            if lowest <= 0 <= highest:
                return None if lowest < highest else relation == "eq"
            return relation == "ne"
        case "lt" | "ge":
            return None if lowest < 0 <= highest else (highest < 0) == (relation == "lt")
        case "le" | "gt":
            return None if lowest <= 0 < highest else (highest <= 0) == (relation == "le")


def _ends(size: int) -> tuple[int, int]:
    """Return numbers that a size is never below and never above."""
    return lowest(size), highest(size)


def rounded_quotient(dividend: int, divisor: int) -> int | None:
    """Return the quotient of two sizes, rounded down; None where that is no size."""
    if isinstance(divisor, Size):
        return exact_quotient(dividend, divisor) if isinstance(dividend, Size) else None
    return quotient(dividend, divisor) if divisor > 0 else None


_OPAQUE: Final[Mapping[str, Callable[[sympy.Expr], sympy.Expr]]] = {
    "exp": OpaqueUnaryFn_exp,
    "log": OpaqueUnaryFn_log,
    "log2": OpaqueUnaryFn_log2,
    "sqrt": OpaqueUnaryFn_sqrt,
}
"""Functions of ``math``, and what stands for them in an expression."""

_LARGEST: Final = 2**56
"""Larger numbers, such as the end of a slice to the end, are no numbers of elements."""

_RELATIONS: Final[Mapping[Relation, Callable[[sympy.Expr, sympy.Expr], sympy.Basic]]] = {
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
}


def _compares(relation: Relation, left: object, right: object) -> bool:
    assert isinstance(left, int)
    assert isinstance(right, int)
    match relation:
        case "eq":
            return left == right
        case "ne":
            return left != right
        case "lt":
            return left < right
        case "le":
            return left <= right
        case "gt":
            return left > right
        case "ge":
            return left >= right
