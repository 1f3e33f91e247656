"""Casts, sums and collectives of abstract values, element by element."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, assert_never

from zeroir.ir.contents import MASTER, PARAM
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Reduction
from zeroir.ir.program import Flat
from zeroir.verify.interpreter.descriptions import CAUSES
from zeroir.verify.interpreter.domain import (
    ALL_TERM,
    LOST_TERM,
    PAST_TERM,
    POISON,
    SPENT,
    Decision,
    Elements,
    FlatKey,
    Gradient,
    NamedKey,
    Numbering,
    Poison,
    Slice,
    Split,
    Statistic,
    Term,
    Undefined,
    Value,
    Weight,
    Zero,
    aligned,
    leaves,
    mapped,
    moved,
    rebased,
)

Fail = Callable[[str, str], None]
"""A function that reports a code and a message."""


def undefined_in(value: Value) -> Undefined | None:
    """Return the first undefined part of a value."""
    return next((leaf for leaf in leaves(value) if isinstance(leaf, Undefined)), None)


def is_poisoned(value: Value) -> bool:
    """Return whether part of a value was already reported."""
    return any(isinstance(leaf, Poison) for leaf in leaves(value))


class Addition(NamedTuple):
    """The rule for a sum of two operands: it is rounded to ``dtype``, and ``note`` receives each sum of gradients."""

    dtype: DType
    numbering: Numbering
    fail: Fail
    note: Callable[[Sum], None]


class Sum(NamedTuple):
    """One addition to a flat's gradient, and the dtype that it is rounded to.

    Each side is a sorted multiset of terms; the order of the sides does not matter.
    """

    flat: str
    dtype: DType
    sides: tuple[tuple[Term, ...], tuple[Term, ...]]

    @classmethod
    def of(cls, dtype: DType, left: Gradient, right: Gradient) -> Sum:
        """Return the sum of two gradients of one flat.

        A schedule may sum over ranks before or after micro-steps, although the two round differently, as the
        documentation says. So the axes of both sides are ignored if one side includes earlier micro-steps.
        """
        sides = (left.terms, right.terms)
        if any(term.source in (PAST_TERM, ALL_TERM) for terms in sides for term in terms):
            sides = (_on_no_axis(left.terms), _on_no_axis(right.terms))
        first, second = sorted(sides)
        return cls(left.flat, dtype, (first, second))


def _on_no_axis(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(sorted(term._replace(summed=()) for term in terms))


def add(left: Value, right: Value, how: Addition) -> Value:
    """Return ``left + right`` at each position; the sum of two gradients has the contributions of both."""
    fail = how.fail
    if isinstance(left, Slice) or isinstance(right, Slice):
        return _add_slices(left, right, how)
    if isinstance(left, Poison) or isinstance(right, Poison):
        return POISON
    for value in (left, right):
        if isinstance(value, Undefined):
            fail("Z402", f"a sum includes {CAUSES[value.cause]}")
            return POISON
        if isinstance(value, Split):
            fail("Z402", "a sum includes elements of which only this rank's slice was replaced")
            return POISON
    if isinstance(left, Zero):
        return right
    if isinstance(right, Zero):
        return left
    if isinstance(left, Gradient) and isinstance(right, Gradient):
        is_same = (left.flat, left.shift, left.strides) == (right.flat, right.shift, right.strides)
        if is_same:
            how.note(Sum.of(how.dtype, left, right))
            return replace(left, terms=merged(left.terms, right.terms))
        fail("Z402", "gradients of different elements are added to one another")
        return POISON
    if isinstance(left, Gradient) or isinstance(right, Gradient):
        fail("Z402", "a value that no compute op names a gradient (`grad NAME: …`) is added to one")
        return POISON
    if isinstance(left, Weight) and isinstance(right, Weight):
        return Weight(merged(left.terms, right.terms))
    if isinstance(left, Elements) and isinstance(right, Elements):
        is_alike = left.summed == right.summed
        terms = [
            (v.key, v.shift - left.shift, v.strides, () if is_alike else v.summed)
            for v in (left, right)
        ]
        number = how.numbering.of(("add", how.dtype, *terms))
        return Elements(number, left.shift, (), left.summed if is_alike else ())
    return Elements(how.numbering.of(("add", how.dtype, left, right)))


def _add_slices(left: Value, right: Value, how: Addition) -> Value:
    if isinstance(left, Zero):
        return right
    if isinstance(right, Zero):
        return left
    template = next(value for value in (left, right) if isinstance(value, Slice))
    first, second = (_as_slice(value, template) for value in (left, right))
    if first is None or second is None:
        how.fail(
            "Z402", "two sums whose elements stand on different ranks are added to one another"
        )
        return POISON
    array = rebased(second.array, second.shift - first.shift)
    return Slice(
        tuple((a, b, add(x, y, how)) for a, b, x, y in aligned(first.array, array)),
        first.shift,
        first.strides,
    )


def _as_slice(value: Value, like: Slice) -> Slice | None:
    """Return the value as a slice with the strides of another one."""
    if isinstance(value, Slice):
        return value if value.strides == like.strides else None
    inner: Value = value
    if isinstance(value, Elements | Gradient):
        if value.strides != like.strides:
            return None
        inner = replace(value, shift=value.shift - like.shift, strides=())
    elif isinstance(value, Split):
        return None
    return Slice(tuple((a, b, inner) for a, b, _ in like.array), like.shift, like.strides)


def merged(left: tuple[Term, ...], right: tuple[Term, ...]) -> tuple[Term, ...]:
    """Return the sum of two multisets of contributions."""
    counts: dict[tuple[int, tuple[str, ...]], int] = {}
    for term in (*left, *right):
        key = (term.source, term.summed)
        counts[key] = counts.get(key, 0) + term.times
    return tuple(sorted(Term(*key, times) for key, times in counts.items()))


def lost(value: Gradient) -> Gradient:
    """Return a gradient that an op has turned into something else."""
    return replace(value, terms=tuple(t._replace(source=LOST_TERM) for t in value.terms))


def spent(value: Value) -> Value:
    """Return the value of a gradient after an optimizer step has read it; zeros, such as padding, remain zeros."""
    return mapped(value, lambda leaf: leaf if isinstance(leaf, Zero | Poison) else SPENT)


_EXACT: Final[Mapping[DType, frozenset[DType]]] = {
    DType.F64: frozenset(
        {
            *(DType.F32, DType.F16, DType.BF16, DType.F8_E4M3),
            *(DType.I32, DType.I16, DType.I8, DType.U8),
        }
    ),
    DType.F32: frozenset({DType.F16, DType.BF16, DType.F8_E4M3, DType.I16, DType.I8, DType.U8}),
    DType.F16: frozenset({DType.F8_E4M3, DType.I8, DType.U8}),
    DType.BF16: frozenset({DType.F8_E4M3, DType.I8, DType.U8}),
    DType.I64: frozenset({DType.I32, DType.I16, DType.I8, DType.U8}),
    DType.I32: frozenset({DType.I16, DType.I8, DType.U8}),
    DType.I16: frozenset({DType.I8, DType.U8}),
}


def represents(wide: DType, narrow: DType) -> bool:
    """Return whether ``wide`` has every number of ``narrow``, so that the conversion is exact."""
    return wide is narrow or narrow is DType.BOOL or narrow in _EXACT.get(wide, frozenset())


def _computed(leaf: Value, numbering: Numbering, *how: Hashable) -> Value:
    """Return the result of an elementwise op, identified by ``how``; a gradient is then lost."""
    match leaf:
        case Elements():
            return replace(leaf, key=numbering.of((*how, leaf.key)))
        case Gradient():
            return lost(leaf)
        case Statistic() | Decision() | Weight():
            return Elements(numbering.of((*how, leaf)))
        case _:
            return leaf


def on_wire(value: Value, wire: DType, numbering: Numbering) -> Value:
    """Return the value rounded to another dtype: a sum of gradients remains one, any other value becomes a new one."""

    def leaf(inner: Value) -> Value:
        match inner:
            case Elements():
                unsummed = replace(inner, summed=())
                return _computed(unsummed, numbering, "wire", wire, inner.summed)
            case Gradient() if wire.is_floating:
                return inner
            case Statistic(kind="overflow"):
                return inner
            case _:
                return _computed(inner, numbering, "wire", wire)

    return mapped(value, leaf)


class HeldSum(NamedTuple):
    """A sum of contributions to a flat's gradient, over any ranks, and a dtype in which it is stored."""

    flat: str
    dtype: DType
    terms: tuple[Term, ...]


def held_sums(value: Value, dtype: DType) -> Iterator[HeldSum]:
    """Yield the sums of contributions in a value that is stored in ``dtype``."""
    for leaf in leaves(value):
        if isinstance(leaf, Gradient):
            yield HeldSum(leaf.flat, dtype, merged(_on_no_axis(leaf.terms), ()))


def cast(value: Value, target: DType, flats: Mapping[str, Flat], numbering: Numbering) -> Value:
    """Return the value cast to a dtype.

    Master weights rounded to their flat's dtype are the parameter; a gradient remains one; other values get a number.
    """

    def leaf(inner: Value) -> Value:
        match inner:
            case Elements(key=FlatKey(quantity=quantity, flat=flat) as key) if (
                quantity == MASTER and target is flats[flat].dtype
            ):
                return replace(inner, key=replace(key, quantity=PARAM))
            case Gradient() if target.is_floating:
                return inner
            case _:
                return _computed(inner, numbering, "cast", target)

    return mapped(value, leaf)


def scaled(value: Value, by: int, numbering: Numbering) -> Value:
    """Return the value multiplied by ``by``."""
    return mapped(value, lambda leaf: _computed(leaf, numbering, "scale", by))


class Combination(NamedTuple):
    """The combination of the ranks' values along an axis by a collective."""

    axis: str
    reduction: Reduction
    numbering: Numbering
    fail: Fail


def reduced(value: Value, how: Combination) -> Value:
    """Return the combination of the values of all ranks along the axis."""
    axis, is_sum = how.axis, how.reduction is Reduction.SUM
    is_cut = isinstance(value, Elements | Gradient | Slice) and axis in dict(value.strides)
    match value:
        case Slice() | Gradient() if is_cut:
            what = "slices of different" if isinstance(value, Slice) else "different"
            how.fail("Z402", f"a reduction over {axis} adds up {what} elements")
            return POISON
        case Slice():
            return replace(value, array=tuple((a, b, reduced(v, how)) for a, b, v in value.array))
        case Gradient():
            if not is_sum:
                how.fail("Z402", "gradients are combined by their maximum instead of their sum")
                return POISON
            return replace(
                value, terms=tuple(t._replace(summed=(*t.summed, axis)) for t in value.terms)
            )
        case Weight() if is_sum:
            return Weight(tuple(t._replace(summed=(*t.summed, axis)) for t in value.terms))
        case Weight():
            return Elements(how.numbering.of((how.reduction, axis, value)))
        case Statistic():
            summed = (*value.summed, axis)
            return replace(
                value,
                # A maximum does not depend on the order.
                summed=summed if is_sum else tuple(sorted(summed)),
                is_sum=value.is_sum and is_sum,
            )
        case Elements(key=int() | NamedKey()) if is_sum and not is_cut:
            return replace(value, summed=(*value.summed, axis))
        case Elements():
            unmoved = moved(value, -value.shift)
            return Elements(how.numbering.of((how.reduction, axis, unmoved)), value.shift)
        case Decision():
            return Elements(how.numbering.of((how.reduction, axis, value)))
        case Undefined():
            how.fail("Z402", f"a reduction over {axis} includes {CAUSES[value.cause]}")
            return POISON
        case Split():
            only = "elements of which only this rank's slice was replaced"
            how.fail("Z402", f"a reduction over {axis} includes {only}")
            return POISON
        case Zero() | Poison():
            return value
        case _:
            assert_never(value)


def from_rank(value: Value, axis: str, rank: int, numbering: Numbering) -> Value:
    """Return the value of one rank of the axis, as every rank sees it; unchanged if all ranks have the same."""

    def leaf(inner: Value) -> Value:
        match inner:
            case Elements(key=FlatKey()) | Decision():
                return inner
            case Elements() | Statistic() if axis in inner.summed:
                return inner
            case Gradient() | Weight() if all(axis in term.summed for term in inner.terms):
                return inner
            case _:
                return _computed(inner, numbering, "from", axis, rank)

    return mapped(value, leaf)
