"""Abstract values: each element of a buffer, as a function of its position and of the mesh coordinate.

A value covers a piece of a buffer. A value with ``shift`` and ``strides`` refers to an array, such as a flat's
parameters: position ``p`` has element ``p + shift + Σ stride × coordinate(axis)`` of that array. So one interpretation
covers every rank, and splitting a piece in two changes neither half. Mesh axes of size 1 never appear.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, assert_never

Strides = tuple[tuple[str, int], ...]
"""(axis, elements per step of its coordinate), sorted by axis; no zero strides."""


@dataclass(frozen=True, slots=True)
class FlatKey:
    """A flat quantity (param, master, a state) at a version.

    ``guess`` is the value number of the scalars and settings that a speculative step used; None if the elements are
    final.
    """

    quantity: str
    flat: str
    version: int
    guess: int | None = None


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A named content; ``version`` counts the step's in-place changes of it."""

    name: str
    version: int


Key = FlatKey | NamedKey | int
"""An int is a value number: the result of a computation."""


@dataclass(frozen=True, slots=True)
class Undefined:
    """A value that must not be read. ``cause`` is ``unwritten``, ``stale``, ``scratch``, ``spent`` or ``torn``."""

    cause: str


@dataclass(frozen=True, slots=True)
class Zero:
    """Zero."""


@dataclass(frozen=True, slots=True)
class Poison:
    """The result of an error that was already reported; it causes no further findings."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a quantity, a named content or a computed value, summed over the axes ``summed`` in that order."""

    key: Key
    shift: int = 0
    strides: Strides = ()
    summed: tuple[str, ...] = ()


class Term(NamedTuple):
    """A contribution to a gradient.

    ``source`` is its value number, or one of the constants below; ``summed`` are the axes it was summed over, in order;
    ``times`` is how often it was added.
    """

    source: int
    summed: tuple[str, ...]
    times: int


PAST_TERM: Final = -1
"""The sum of all micro-steps before this one."""
ALL_TERM: Final = -2
"""The sum of all micro-steps of the step."""
LOST_TERM: Final = -3
"""A contribution whose value an op changed, for example by scaling: no gradient may have it."""
_CURRENT_TERM: Final = -4


def current_term(micro_batch: int) -> int:
    """Return the source of the weight of a micro-batch of the section, counted from 0."""
    return _CURRENT_TERM - micro_batch


def current_micro_batch(source: int) -> int | None:
    """Return the micro-batch of a weight's source; None if it is something else."""
    return _CURRENT_TERM - source if source <= _CURRENT_TERM else None


@dataclass(frozen=True, slots=True)
class Gradient:
    """A sum of contributions to elements of a flat's gradient."""

    flat: str
    terms: tuple[Term, ...]
    shift: int = 0
    strides: Strides = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """A sum of the weights of micro-batches; its terms are those of a gradient, with ``current_term`` as source."""

    terms: tuple[Term, ...]


class Cover(NamedTuple):
    """Flat elements ``shift + Σ stride × coordinate + [0, numel)`` that a statistic or an optimizer step has read."""

    flat: str
    shift: int
    strides: Strides
    numel: int

    def intervals(self, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return the flat elements that all ranks cover together, as intervals.

        ``sizes`` are those of the mesh axes.
        """
        starts = [self.shift]
        length = self.numel
        for axis, stride in sorted(self.strides, key=lambda item: item[1]):
            size = sizes[axis]
            if stride == length:
                length *= size
            else:
                starts = [start + rank * stride for rank in range(size) for start in starts]
        return [(start, start + length) for start in starts]


@dataclass(frozen=True, slots=True)
class Statistic:
    """A sum of squares (``norm``) or a finiteness flag (``overflow``) over gradients, combined over ``summed``.

    ``order`` lists what was read, source by source: a flat, and the interval of its elements that all ranks read
    together, without the padding around the parameters.
    """

    kind: str
    covers: tuple[Cover, ...]
    order: tuple[tuple[str, int, int], ...] = ()
    summed: tuple[str, ...] = ()
    is_sum: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """A result of ``decide`` or ``guess``; ``number`` distinguishes these ops.

    ``what`` is ``divisor``, ``skip`` or ``redo``, or for a guess ``guessed divisor`` or ``next step``.
    """

    what: str
    number: int


UNKNOWN_GUESS: Final = -1
"""Marks guessed elements in an entry state, which does not say what they were computed from."""

Pieces = tuple[tuple[int, int, "Value"], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of an array that consists of pieces; which elements depends on the coordinate."""

    array: Pieces
    shift: int
    strides: Strides


@dataclass(frozen=True, slots=True)
class Split:
    """Positions ``[start, stop)``, of which this rank's slice along ``axis`` differs from the rest.

    ``own`` is a value over slice-local positions, ``rest`` pieces over ``[0, stop - start)``.
    """

    axis: str
    start: int
    stop: int
    own: Value
    rest: Pieces


Value = (
    Undefined | Zero | Poison | Elements | Gradient | Weight | Statistic | Decision | Slice | Split
)
PieceList = Sequence[tuple[int, int, Value]]

ZERO: Final = Zero()
POISON: Final = Poison()
UNWRITTEN: Final = Undefined("unwritten")
STALE: Final = Undefined("stale")
SPENT: Final = Undefined("spent")
SCRATCH: Final = Undefined("scratch")
TORN: Final = Undefined("torn")


class Numbering:
    """Value numbers: equal keys get equal numbers. Programs that are compared share one numbering.

    ``prepared`` is what has been derived of segments with these numbers, by their digests.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.prepared: dict[str, object] = {}

    def of(self, key: Hashable) -> int:
        """Return the number of a key."""
        return self._numbers.setdefault(key, len(self._numbers))


def moved(value: Value, delta: int, strides: Strides = ()) -> Value:
    """Return the value at position + delta + Σ stride × coordinate: the new position q is that old position."""
    if delta == 0 and not strides:
        return value
    match value:
        case Elements() | Gradient() | Slice():
            sums = value.strides
            if strides:
                steps = dict(sums)
                for axis, stride in strides:
                    steps[axis] = steps.get(axis, 0) + stride
                sums = tuple(sorted((axis, step) for axis, step in steps.items() if step))
            return replace(value, shift=value.shift + delta, strides=sums)
        case Split():
            if strides:
                return TORN
            return replace(value, start=value.start - delta, stop=value.stop - delta)
        case Undefined() | Zero() | Poison() | Weight() | Statistic() | Decision():
            return value
        case _:
            assert_never(value)


def rebased(pieces: PieceList, origin: int) -> list[tuple[int, int, Value]]:
    """Return the pieces with positions relative to ``origin``."""
    if origin == 0:
        return list(pieces)
    return [(a - origin, b - origin, moved(v, origin)) for a, b, v in pieces]


def at_coordinate(value: Value, axis: str, coordinate: int) -> Value:
    """Return the value on the ranks at one coordinate of an axis."""
    match value:
        case Slice():
            array = tuple((a, b, at_coordinate(v, axis, coordinate)) for a, b, v in value.array)
            return _placed(replace(value, array=array), axis, coordinate)
        case Elements() | Gradient():
            return _placed(value, axis, coordinate)
        case Split():
            return TORN
        case Undefined() | Zero() | Poison() | Weight() | Statistic() | Decision():
            return value
        case _:
            assert_never(value)


def _placed(value: Elements | Gradient | Slice, axis: str, coordinate: int) -> Value:
    stride = dict(value.strides).get(axis)
    if stride is None:
        return value
    rest = tuple(step for step in value.strides if step[0] != axis)
    return replace(value, shift=value.shift + stride * coordinate, strides=rest)


def coalesced(pieces: PieceList) -> list[tuple[int, int, Value]]:
    """Merge adjacent pieces with equal values; the pieces must be in order."""
    merged: list[tuple[int, int, Value]] = []
    for a, b, value in pieces:
        if a == b:
            continue
        if merged and merged[-1][1] == a and merged[-1][2] == value:
            merged[-1] = (merged[-1][0], b, value)
        else:
            merged.append((a, b, value))
    return merged


def pack(pieces: PieceList) -> Value:
    """Return one value over ``[0, numel)`` for pieces that cover it."""
    if len(pieces) == 1:
        return pieces[0][2]
    return Slice(tuple(pieces), 0, ())


def unpack(value: Value, numel: int) -> list[tuple[int, int, Value]]:
    """Return the pieces over ``[0, numel)`` of one value there."""
    if not isinstance(value, Slice) or value.strides:
        return [(0, numel, value)]
    return window(value.array, value.shift, numel)


def window(array: PieceList, start: int, numel: int) -> list[tuple[int, int, Value]]:
    """Return the pieces ``[start, start + numel)`` of an array, relative to ``start``; outside it the value is torn."""
    stop = start + numel
    inside: list[tuple[int, int, Value]] = []
    at = start
    for a, b, value in array:
        if b <= start or a >= stop:
            continue
        low, high = max(a, start), min(b, stop)
        if low > at:
            inside.append((at - start, low - start, TORN))
        is_cut = isinstance(value, Split) and (value.start < low or value.stop > high)
        inside.append((low - start, high - start, TORN if is_cut else moved(value, start)))
        at = high
    if at < stop:
        inside.append((at - start, numel, TORN))
    return inside


def simplify(value: Value, numel: int, sizes: Mapping[str, int]) -> Value:
    """Return the value of the piece that all ranks read, where a slice reads only one; otherwise the slice."""
    if not isinstance(value, Slice):
        return value
    low, high = value.shift, value.shift + numel
    for axis, stride in value.strides:
        reach = stride * (sizes[axis] - 1)
        low, high = (low, high + reach) if stride > 0 else (low + reach, high)
    for a, b, inner in value.array:
        if a <= low and high <= b:
            return moved(inner, value.shift, value.strides)
    return value


def spread(
    pieces: PieceList,
    axis: str,
    size: int,
    numel: int,
    stride: int,
    seen: Callable[[Value, int], Value] | None = None,
) -> list[tuple[int, int, Value]]:
    """Return the value that all ranks of an axis have together: element j of rank r is at ``r × stride + j``.

    ``pieces`` cover ``[0, numel)`` on each rank. With stride = numel this is an all-gather. ``seen`` returns the value
    of rank r as the other ranks see it; without it, ranks with equal values have equal elements.
    """
    if seen is None and len(pieces) == 1 and stride == numel:
        value = pieces[0][2]
        match value:
            case Elements() | Gradient() | Slice() if (axis, numel) in value.strides:
                whole = _placed(value, axis, 0)
                if at_coordinate(whole, axis, 0) == whole:
                    return coalesced(unpack(whole, numel * size))
            case Zero() | Poison() | Undefined():
                return [(0, numel * size, value)]
            case _:
                pass
    gathered: list[tuple[int, int, Value]] = []
    for rank in range(size):
        origin = rank * stride
        for a, b, value in pieces:
            there = at_coordinate(value, axis, rank)
            if seen is not None:
                there = seen(there, rank)
            there = moved(there, a)
            for low, high, inner in unpack(there, b - a):
                gathered.append((origin + a + low, origin + a + high, moved(inner, -(origin + a))))
    return coalesced(gathered)


def opened(pieces: PieceList) -> list[tuple[int, int, Value]]:
    """Replace every slice that is the same on all ranks by the pieces that it consists of."""
    return [
        (start + low, start + high, moved(inner, -start))
        for start, stop, value in pieces
        for low, high, inner in unpack(moved(value, start), stop - start)
    ]


def cut(pieces: PieceList, start: int, stop: int) -> list[tuple[int, int, Value]]:
    """Return the parts of the pieces inside ``[start, stop)``, at their positions."""
    return [(max(a, start), min(b, stop), v) for a, b, v in pieces if a < stop and b > start]


def leaves(value: Value) -> Iterator[Value]:
    """Yield the value, or the values that a slice or a split consists of."""
    if isinstance(value, Slice):
        for _, _, inner in value.array:
            yield from leaves(inner)
    elif isinstance(value, Split):
        yield from leaves(value.own)
        for _, _, inner in value.rest:
            yield from leaves(inner)
    else:
        yield value


def mapped(value: Value, change: Callable[[Value], Value]) -> Value:
    """Apply ``change`` to the value; for a slice or a split, to each piece of it."""
    if isinstance(value, Slice):
        return replace(value, array=tuple((a, b, mapped(v, change)) for a, b, v in value.array))
    if isinstance(value, Split):
        rest = tuple((a, b, mapped(v, change)) for a, b, v in value.rest)
        return replace(value, own=mapped(value.own, change), rest=rest)
    return change(value)


def aligned(left: PieceList, right: PieceList) -> list[tuple[int, int, Value, Value]]:
    """Split two lists of pieces over the same interval at the bounds of both lists."""
    pairs: list[tuple[int, int, Value, Value]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low = max(left[i][0], right[j][0])
        high = min(left[i][1], right[j][1])
        if low < high:
            pairs.append((low, high, left[i][2], right[j][2]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return pairs
