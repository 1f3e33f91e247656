"""The parts of torch that compute with sizes which depend on dims, and that torch may change: symbols and guards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, cast

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.functions import Max
from torch.utils._sympy.value_ranges import ValueRanges

from zeroir.errors import InternalError
from zeroir.ir.sizes import Dim, Size


class NoPolynomialError(Exception):
    """A size is no polynomial of dims; the text says which it is."""


class DimEnv(ShapeEnv):
    """The symbols of dims while a model is traced, and the sizes that torch computes with them."""

    def __init__(self, examples: Mapping[Dim, int]) -> None:
        super().__init__(duck_shape=False)
        self.dims: dict[sympy.Symbol, Dim] = {}
        self._symints: dict[Dim, torch.SymInt] = {}
        for dim, example in examples.items():
            # Torch takes sizes of 0 and 1 for constants, so a trace is one of larger sizes.
            hint = example if example > 1 else min(dim.maximum, 2 + len(self.dims))
            source = ConstantSource(dim.name)
            range_of_dim = ValueRanges(dim.minimum, dim.maximum)
            symbol = self.create_symbol(
                hint,
                source=source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=StrictMinMaxConstraint(vr=range_of_dim, warn_only=False),
            )
            symint = self.create_symintnode(symbol, hint=hint, source=source)
            if isinstance(symint, int):
                raise InternalError(f"torch takes the dim {dim.name} for the constant {symint}")
            self.dims[symint.node.expr] = dim
            self._symints[dim] = symint
        self._ranges = tuple(
            (symbol, ValueRanges(dim.minimum, dim.maximum)) for symbol, dim in self.dims.items()
        )
        self._assumptions: dict[str, str] = {}

    def symint(self, size: int) -> int | torch.SymInt:
        """Return a size as torch computes with it."""
        if not isinstance(size, Size):
            return size
        total: int | torch.SymInt = 0
        for coefficient, monomial in size.terms:
            product: int | torch.SymInt = coefficient
            for dim, power in monomial:
                for _ in range(power):
                    product = product * self._symints[dim]
            total = total + product
        return total

    def size(self, expression: sympy.Expr) -> int:
        """Return the size that an expression of torch means.

        Raises:
            NoPolynomialError: where it is none.
        """
        expression = expression.replace(Max, self._largest)
        symbols = sorted(expression.free_symbols, key=str)
        if not symbols:
            return int(expression)
        try:
            polynomial = sympy.Poly(expression, *symbols)
        except sympy.PolynomialError:
            raise NoPolynomialError(self.text(expression)) from None
        total: int = 0
        for powers, coefficient in polynomial.terms():
            if not coefficient.is_Integer or any(symbol not in self.dims for symbol in symbols):
                raise NoPolynomialError(self.text(expression))
            product: int = int(coefficient)
            for symbol, power in zip(symbols, powers, strict=True):
                for _ in range(power):
                    product = self.dims[symbol].size * product
            total = total + product
        return total

    def _largest(self, *numbers: sympy.Expr) -> sympy.Expr:
        """Return the number that is the largest for all values of dims; torch's strides count a size of 0 as 1."""
        for number in numbers:
            others = (other for other in numbers if other is not number)
            if all(self._maybe_evaluate_static(sympy.Ge(number, other)) for other in others):
                return number
        return cast("sympy.Expr", Max(*numbers))  # type: ignore[no-untyped-call]

    def text(self, expression: sympy.Expr) -> str:
        """Return an expression with the names of dims."""
        names = {symbol: sympy.Symbol(dim.name) for symbol, dim in self.dims.items()}
        named = expression.xreplace(names)
        sign = {sympy.Eq: "=", sympy.Ne: "!="}.get(type(named))
        text = str(named) if sign is None else f"{named.args[0]} {sign} {named.args[1]}"
        return text.replace("**", "^")

    @property
    def assumptions(self) -> Mapping[str, str]:
        """What the trace assumes of dims beyond their ranges, each with the ``file:line`` of what asked, or ``""``."""
        return self._assumptions

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: object, **kwargs: object) -> sympy.Basic:
        """Answer a question about sizes by the example's, and note it if other sizes have another answer.

        Torch's operators ask which sizes are 1, and in which order strides are, to choose the layout of a result. A
        program declares layouts, and values do not depend on them, so these questions count as no assumption.
        """
        # Torch's own record leaves out what follows from earlier answers.
        is_open = (
            bool(orig_expr.free_symbols)
            and self._maybe_evaluate_static(orig_expr, axioms=(), var_to_range=self._ranges) is None
        )
        answer: sympy.Basic = super().evaluate_expr(orig_expr, *args, **kwargs)  # type: ignore[arg-type]
        if is_open:
            frames = list(_frames_outside_torch())
            assumption = _assumption(orig_expr, answer)
            is_operators = bool(frames) and frames[0].filename.startswith(_OWN_FOLDER)
            if not (is_operators and _is_about_layout(assumption)):
                users = (f for f in frames if not f.filename.startswith(_OWN_FOLDER))
                line = next((f"{Path(f.filename).name}:{f.lineno}" for f in users), "")
                self._assumptions.setdefault(self.text(assumption), line)
        return answer

    def _refine_ranges(self, expr: sympy.Basic) -> None:
        """Leave the ranges of dims as they are, so that no answer narrows them."""


def size_of(size: int | torch.SymInt) -> int:
    """Return a size that torch computed as a plain integer or a polynomial of dims.

    Raises:
        NoPolynomialError: where it is neither.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    env = size.node.shape_env
    assert isinstance(env, DimEnv)
    return env.size(size.node.expr)


def has_dims(tensors: Iterable[Tensor]) -> bool:
    """Return whether a size of one of these tensors depends on a dim."""
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _is_about_layout(guard: sympy.Expr) -> bool:
    """Return whether a guard says that a size is not 0 or 1, or compares two strides."""
    return isinstance(
        guard,
        sympy.Ne
        | sympy.StrictLessThan
        | sympy.LessThan
        | sympy.GreaterThan
        | sympy.StrictGreaterThan,
    )


def _assumption(question: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    """Return what a question and its answer say together."""
    if answer is sympy.true or answer is True:
        return question
    if answer is sympy.false or answer is False:
        return sympy.Not(question)
    return sympy.Eq(question, answer)


class _Frame(NamedTuple):
    filename: str
    lineno: int


def _frames_outside_torch() -> Iterator[_Frame]:
    """Yield the callers that are neither torch nor sympy, the innermost one first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            not frame.f_code.co_filename.startswith(_LIBRARIES)
            and frame.f_code.co_filename != __file__
        ):
            yield _Frame(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


_OWN_FOLDER = f"{Path(__file__).parents[1]}/"
_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(sympy.__file__).parent}/")
