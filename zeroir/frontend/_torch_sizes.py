"""The parts of torch that compute with sizes which depend on dims, and that torch may change: symbols and guards."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Final, NamedTuple

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges

from zeroir.errors import InternalError, Remainders
from zeroir.frontend._torch_dim_nodes import (
    DimNode,
    PolynomialEnv,
    Relation,
    answer_for_all,
    rounded_quotient,
)
from zeroir.frontend._torch_size_values import holds_for_each, modulus_of
from zeroir.ir.size_bounds import grows
from zeroir.ir.sizes import Dim, Size, exact_quotient


class NoPolynomialError(Exception):
    """A size is no polynomial of dims; the text says which it is. ``dims`` are the names of those that it has.

    It may be one for each remainder by ``modulus``, if there is one.
    """

    def __init__(self, text: str, dims: Iterable[str], modulus: int | None) -> None:
        super().__init__(text)
        self.dims = tuple(dims)
        self.modulus = modulus


class SplitError(Exception):
    """Sizes decide what a trace computes, and no ranges of dims leave one decision."""

    def __init__(self, assumption: Assumption) -> None:
        super().__init__(assumption.text)
        self.assumption = assumption


class DimRange(NamedTuple):
    """The values of a dim from the least to the most, both included."""

    least: int
    most: int

    @classmethod
    def of(cls, dim: Dim) -> DimRange:
        """Return all values of a dim."""
        return cls(dim.minimum, dim.maximum)


class Assumption(NamedTuple):
    """What a trace assumes of dims, by name, and the ``file:line`` of what asked, or ``""``.

    ``modulus`` is the number by whose remainders sizes may have one answer each, if there is one. ``module`` names the
    innermost module whose code asked, empty for the model itself, if one did.
    """

    text: str
    line: str
    dims: tuple[str, ...]
    modulus: int | None
    module: str | None

    def remainders(self, place: str) -> Remainders | None:
        """Return the remainders by which the code at ``line``, or else at ``place``, may decide."""
        if self.modulus is None:
            return None
        return Remainders(self.dims, self.modulus, self.line or place)


def _combined(expression: sympy.Expr, parts: list[int]) -> int | None:
    """Return the size that an operation makes of sizes; None where it makes none."""
    first, *others = parts
    match expression:
        case sympy.Add():
            return sum(others, first)
        case sympy.Mul():
            return math.prod(others, start=first)
        case Max() | Min():
            # Torch's strides count a size of 0 as 1, and its slices end at the tensor's end.
            relation: Relation = "ge" if isinstance(expression, Max) else "le"
            for part in parts:
                if all(answer_for_all(relation, part, other) for other in parts):
                    return part
            return None
        case _:
            (divisor,) = others
            rounded = rounded_quotient(first, divisor)
            if rounded is None or isinstance(expression, FloorDiv):
                return rounded
            return first - rounded * divisor


class _Asker(NamedTuple):
    """What asked about sizes: the ``file:line``, or ``""``, and the name of a module, if it is one's code."""

    line: str
    module: str | None


class DimEnv(PolynomialEnv):
    """The symbols of dims while a model is traced, and the sizes that torch computes with them.

    ``running`` returns the name of the module that runs, empty for the model itself, if one does.
    """

    running: Callable[[], str | None] = staticmethod(lambda: None)

    def __init__(self, examples: Mapping[Dim, int]) -> None:
        super().__init__()
        self.dims: dict[sympy.Symbol, Dim] = {}
        self.examples = examples
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
            self.symbols[dim], self.hints[dim.name] = symint.node.expr, hint
        self._ranges = tuple(
            (symbol, ValueRanges(dim.minimum, dim.maximum)) for symbol, dim in self.dims.items()
        )
        self._assumptions: dict[sympy.Basic, _Asker] = {}
        self._answers: dict[sympy.Basic, _Answer] = {}

    def size(self, expression: sympy.Expr) -> int:
        """Return the size that an expression of torch means.

        Raises:
            NoPolynomialError: where it is none.
        """
        size = self.polynomial(expression)
        if size is None:
            names = self._names(expression)
            raise NoPolynomialError(self.text(expression), names, modulus_of(expression))
        return size

    def stride(self, expression: sympy.Expr) -> sympy.Expr:
        """Return a stride of torch in which no size of 0 counts as 1: a tensor with one has no elements."""
        sizes: dict[sympy.Expr, sympy.Expr] = {}
        for largest in expression.atoms(Max):
            one, *others = sorted(largest.args, key=lambda part: not part.is_number)
            if one == 1 and len(others) == 1:
                size = self.polynomial(others[0])
                if size is not None and answer_for_all("ge", size, 0):
                    sizes[largest] = others[0]
        return expression.xreplace(sizes)

    def polynomial(self, expression: sympy.Expr) -> int | None:
        match expression:
            case sympy.Integer():
                return int(expression)
            case sympy.Symbol() if expression in self.dims:
                return self.dims[expression].size
            case sympy.Add() | sympy.Mul() | Max() | Min() | FloorDiv() | Mod() | PythonMod():
                parts: list[int] = []
                for argument in expression.args:
                    part = self.polynomial(argument)
                    if part is None:
                        return None
                    parts.append(part)
                return _combined(expression, parts)
            case sympy.Pow(args=(base, sympy.Integer() as power)) if power > 0:
                size = self.polynomial(base)
                return None if size is None else math.prod([size] * int(power))
            case _:
                return None

    def _names(self, expression: sympy.Basic) -> tuple[str, ...]:
        """Return the names of the dims in an expression."""
        symbols = expression.free_symbols
        return tuple(dim.name for symbol, dim in self.dims.items() if symbol in symbols)

    def text(self, expression: sympy.Expr) -> str:
        """Return an expression with the names of dims."""
        names = {symbol: sympy.Symbol(dim.name) for symbol, dim in self.dims.items()}
        named = expression.xreplace(names)
        sign = {sympy.Eq: "=", sympy.Ne: "!="}.get(type(named))
        text = str(named) if sign is None else f"{named.args[0]} {sign} {named.args[1]}"
        return text.replace("**", "^")

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the traces assume of dims beyond their ranges."""
        return tuple(self._assumption(what, asker) for what, asker in self._assumptions.items())

    def _assumption(self, what: sympy.Basic, asker: _Asker) -> Assumption:
        return Assumption(
            text=self.text(what),
            line=asker.line,
            dims=self._names(what),
            modulus=modulus_of(what),
            module=asker.module,
        )

    def ranges(self) -> dict[Dim, DimRange]:
        """Return the dims that need a smaller range so that all assumptions hold: one around the trace's value.

        Raises:
            SplitError: where an assumption does not hold for the trace's values alone.
        """
        ranges: dict[Dim, DimRange] = {}
        for what, asker in self._assumptions.items():
            if self._holds(what, ranges):
                continue
            of_trace = {
                dim: DimRange(self.hints[dim.name], self.hints[dim.name])
                for symbol, dim in self.dims.items()
                if symbol in what.free_symbols
            }
            present = {dim: ranges.get(dim, DimRange.of(dim)) for dim in of_trace}
            ranges |= of_trace
            if not self._holds(what, ranges):
                raise SplitError(self._assumption(what, asker))
            # Ranges that a user gives stay as wide as possible.
            for dim in sorted(of_trace, key=lambda dim: dim.minimum == 1):
                ranges[dim] = self._widened(what, dim, present[dim], ranges)
        return {dim: range_ for dim, range_ in ranges.items() if range_ != DimRange.of(dim)}

    def first_failing(self, ranges: Mapping[Dim, DimRange]) -> Assumption | None:
        """Return the first assumption that does not hold for all values in these ranges, if there is one."""
        failing = (
            self._assumption(what, asker)
            for what, asker in self._assumptions.items()
            if not self._holds(what, ranges)
        )
        return next(failing, None)

    def assume(self, what: sympy.Basic, line: str) -> None:
        """Assume something of dims, unless it is true for all their values."""
        if not self._holds(what, {}):
            self._assumptions.setdefault(what, _Asker(line, None))

    @contextmanager
    def other_trace(self) -> Iterator[None]:
        """Within the block the assumptions are those of another trace; those so far are kept."""
        kept, self._assumptions = self._assumptions, {}
        try:
            yield
        finally:
            self._assumptions = kept

    def _widened(
        self, what: sympy.Basic, dim: Dim, within: DimRange, ranges: Mapping[Dim, DimRange]
    ) -> DimRange:
        """Return the widest range of a dim around its present one for which an assumption holds."""
        least, most = ranges[dim]
        wrong = within.least - 1
        while least - wrong > 1:
            middle = (least + wrong) // 2
            if self._holds(what, {**ranges, dim: DimRange(middle, most)}):
                least = middle
            else:
                wrong = middle
        wrong = within.most + 1
        while wrong - most > 1:
            middle = (most + wrong) // 2
            if self._holds(what, {**ranges, dim: DimRange(least, middle)}):
                most = middle
            else:
                wrong = middle
        return DimRange(least, most)

    def _holds(self, what: sympy.Basic, ranges: Mapping[Dim, DimRange]) -> bool:
        """Return whether an assumption holds for all values of dims in these ranges; the other dims have their own."""
        sizes = {
            dim: Dim(name=dim.name, minimum=least, maximum=most).size if least < most else least
            for dim, (least, most) in ranges.items()
        }
        known = self._known(what, sizes)
        if known is None:
            known = holds_for_each(
                what,
                {
                    symbol: ranges.get(dim, DimRange.of(dim))
                    for symbol, dim in self.dims.items()
                    if symbol in what.free_symbols
                },
            )
        elif isinstance(what, sympy.Eq):
            # What is right where quotients are equal is right for few sizes, beside which there may be a trace of more.
            known = None
        if known is not None:
            return known
        of_symbols = tuple(
            (symbol, ValueRanges(*ranges.get(dim, DimRange.of(dim))))
            for symbol, dim in self.dims.items()
        )
        answer = self._maybe_evaluate_static(what, axioms=(), var_to_range=of_symbols)
        return answer is sympy.true or answer is True

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: object, **kwargs: object) -> sympy.Basic:
        """Answer a question about sizes by the example's, and note it if other sizes have another answer.

        Torch's operators ask which sizes are 1, and in which order strides are, to choose the layout of a result. A
        program declares layouts, and values do not depend on them, so these questions count as no assumption. Any other
        question of an operator, such as whether a slice ends within a tensor, decides what it computes.
        """
        known = self._answers.get(orig_expr)
        if known is None:
            # Torch's own record leaves out what follows from earlier answers.
            is_open = (
                bool(orig_expr.free_symbols)
                and self._maybe_evaluate_static(orig_expr, axioms=(), var_to_range=self._ranges)
                is None
            )
            for_all = self._known(orig_expr) if is_open else None
            if for_all is None:
                answer: sympy.Basic = super().evaluate_expr(orig_expr, *args, **kwargs)  # type: ignore[arg-type]
                known = _Answer(answer, _assumption(orig_expr, answer) if is_open else None)
            else:
                known = _Answer(sympy.true if for_all else sympy.false, None)
            self._answers[orig_expr] = known
        if known.assumption is not None:
            self._note(known.assumption)
        return known.answer

    def _note(self, assumption: sympy.Basic) -> None:
        if assumption in self._assumptions:
            return
        frames = _frames_outside_torch()
        innermost = next(frames, None)
        is_operators = innermost is not None and innermost.filename.startswith(_OWN_FOLDER)
        if not (is_operators and self._is_about_layout(assumption)):
            callers = frames if innermost is None else chain((innermost,), frames)
            users = (f for f in callers if not f.filename.startswith(_OWN_FOLDER))
            line = next((f"{Path(f.filename).name}:{f.lineno}" for f in users), "")
            self._assumptions[assumption] = _Asker(line, self.running())

    def _is_about_layout(self, assumption: sympy.Basic) -> bool:
        """Return whether an assumption says that a size is not 0 or 1, or compares two strides."""
        if not isinstance(assumption, _MORE_OR_LESS):
            return False
        if isinstance(assumption, sympy.Ne) and isinstance(assumption.lhs, Mod | PythonMod):
            assumption = sympy.Ne(*assumption.lhs.args, evaluate=False)
        left, right = self.polynomial(assumption.lhs), self.polynomial(assumption.rhs)
        if left is None or right is None:
            return False
        if isinstance(assumption, sympy.Ne):
            # Where operators need equal sizes, other ones are errors.
            size, other = (left, right) if isinstance(left, Size) else (right, left)
            if isinstance(other, Size) or not isinstance(size, Size):
                return True
            # A remainder is no size of a tensor.
            return exact_quotient(size, other) is not None if other else grows(size)
        more, less = (right, left) if isinstance(assumption, sympy.Lt | sympy.Le) else (left, right)
        # A stride is the product of another one and sizes; a slice may end anywhere.
        twice = 2 if isinstance(assumption, sympy.Le | sympy.Ge) else 1
        return isinstance(more, Size) and exact_quotient(more * twice, less) is not None

    def _known(
        self, question: sympy.Basic, sizes: Mapping[Dim, int] = MappingProxyType({})
    ) -> bool | None:
        """Return the answer to a question where dims are these sizes; None where it has several, or none is known."""
        match question:
            case sympy.Not():
                known = self._known(question.args[0], sizes)
                return None if known is None else not known
            case sympy.And() | sympy.Or():
                decisive = isinstance(question, sympy.Or)
                answers = [self._known(argument, sizes) for argument in question.args]
                if decisive in answers:
                    return decisive
                return None if None in answers else not decisive
            case sympy.logic.boolalg.BooleanAtom():
                return bool(question)
            case sympy.core.relational.Relational():
                return self._relation_for_all(question, sizes)
            case _:
                return None

    def _relation_for_all(
        self, question: sympy.core.relational.Relational, sizes: Mapping[Dim, int]
    ) -> bool | None:
        relation = _RELATIONS.get(type(question))
        sides = [self.polynomial(side) for side in (question.lhs, question.rhs)]
        left, right = (side.replaced(sizes) if isinstance(side, Size) else side for side in sides)
        if left is None or right is None or relation is None:
            return None
        return answer_for_all(relation, left, right)

    def _refine_ranges(self, expr: sympy.Basic) -> None:
        """Leave the ranges of dims as they are, so that no answer narrows them."""

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        """Leave dims as they are, so that no answer turns one into a constant or another."""


_MORE_OR_LESS: Final = (sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)

_RELATIONS: Final[Mapping[type[sympy.Basic], Relation]] = {
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.Lt: "lt",
    sympy.Le: "le",
    sympy.Gt: "gt",
    sympy.Ge: "ge",
}


def size_of(size: int | torch.SymInt) -> int:
    """Return a size that torch computed as a plain integer or a polynomial of dims.

    Raises:
        NoPolynomialError: where it is neither.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    node = size.node
    if isinstance(node, DimNode):
        return node.size
    env = node.shape_env
    assert isinstance(env, DimEnv)
    return env.size(node.expr)


def stride_of(step: int | torch.SymInt) -> int:
    """Return a stride that torch computed. Torch's strides count a size of 0 as 1, and a program's as 0.

    Raises:
        NoPolynomialError: where it is no polynomial of dims.
    """
    if not isinstance(step, torch.SymInt) or isinstance(step.node, DimNode):
        return size_of(step)
    env = step.node.shape_env
    assert isinstance(env, DimEnv)
    return env.size(env.stride(step.node.expr))


@contextmanager
def left_out(mode: FakeTensorMode) -> Iterator[Callable[[], None]]:
    """Forget what the code of the block asks of sizes; yield a function that keeps what it has asked so far.

    The sizes that torch makes of values of tensors are forgotten, too.
    """
    env = mode.shape_env
    if not isinstance(env, DimEnv):
        yield lambda: None
        return
    kept = dict(env._assumptions)

    def keep() -> None:
        kept.update(env._assumptions)

    try:
        with env.ignore_fresh_unbacked_symbols():
            yield keep
    finally:
        env._assumptions = kept


def assume_not_1(size: int | torch.SymInt, line: str) -> None:
    """Assume that a size is not 1, which the operator at ``line`` treats apart, unless it is a constant."""
    if isinstance(size, torch.SymInt):
        env = size.node.shape_env
        assert isinstance(env, DimEnv)
        env.assume(sympy.Ne(size.node.expr, 1), line)


def torch_sizes(sizes: Iterable[int], mode: FakeTensorMode) -> list[int | torch.SymInt]:
    """Return sizes as torch computes with them in this mode."""
    env = mode.shape_env
    return [env.symint(size) if isinstance(env, DimEnv) else size for size in sizes]


def has_dims(tensors: Iterable[Tensor]) -> bool:
    """Return whether a size of one of these tensors depends on a dim."""
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _assumption(question: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    """Return what a question and its answer say together."""
    if answer is sympy.true or answer is True:
        return question
    if answer is sympy.false or answer is False:
        return sympy.Not(question)
    return sympy.Eq(question, answer)


class _Answer(NamedTuple):
    """The answer to a question, and what it assumes of dims, if anything."""

    answer: sympy.Basic
    assumption: sympy.Basic | None


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
