"""Values: what elements of memory are. A certificate names each; ops make new ones of those that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.certificates.segments import Numbers
from tools.certificates.spans import Pieces, aligned, merged, require
from tools.checker.program import GATHERS, Declarations, slot_numel
from tools.checker.reading import FileRecord

Key = tuple[Any, ...]
"""An array: ("zero",), ("undefined",), ("flat", quantity, flat, version, guess), ("gradient", flat, terms), ("weight",
terms), ("value", number, axes); a term is a source, the axes that it is summed over, and how often it was added."""
Value = tuple[Key, int]
"""Elements of an array: element p of a region is element p + shift of it."""
Claim = list[tuple[int, int]]
"""The pieces of a region, in order: where each ends, and the number of its content in the certificate."""
ZERO: Value = (("zero",), 0)
UNDEFINED: Value = (("undefined",), 0)
PAST, ALL, LOST, CURRENT = -1, -2, -3, -4
"""Sources: all micro-steps before, or all of the step; what is of no use; the weight of the present micro-batch."""
OF_RANK = {"GradNorm", "CheckFinite"}
"""Meanings of statistics, which have read other elements on each rank."""
OF_SECTION = {
    "advanced",
    "update_scale",
    "gradient_divisor",
    "skip",
    "redo",
    "guessed",
    "next_step",
}
"""Meanings of names, which are decisions and what they count; no other number may be made of them."""
SUMS = {"gradient", "weight"}
_PLACED = {"flat", "gradient", "value", "made"}
_EXACT = {
    "f64": "f32 f16 bf16 f8_e4m3 i32 i16 i8 u8", "f32": "f16 bf16 f8_e4m3 i16 i8 u8", "f16": "f8_e4m3 i8 u8",
    "bf16": "f8_e4m3 i8 u8", "i64": "i32 i16 i8 u8", "i32": "i16 i8 u8", "i16": "i8 u8",
}  # fmt: skip
_FLOATS = {"f64", "f32", "f16", "bf16", "f8_e4m3"}


def made(definition: Key, shift: int = 0, axes: Key = ()) -> Value:
    """Return what an op computes; the certificate has a number for it."""
    return ("made", definition, axes), shift


def moved(value: Value, by: int) -> Value:
    """Return a value for positions that count from another start."""
    return (value[0], value[1] + by) if value[0][0] in _PLACED else value


def changed(value: Value, *how: object) -> Value:
    """Return the result of an op on each element; a sum of contributions is lost by it."""
    key, shift = value
    if key[0] in {"zero", "undefined"}:
        return value
    if key[0] == "gradient":
        return (*key[:2], tuple((LOST, axes, times) for _, axes, times in key[2])), shift
    return made((*how, key), shift, key[-1] if key[0] in {"value", "made"} else ())


def converted(value: Value, target: str, flats: dict[str, FileRecord]) -> Value:
    """Return a value in another dtype: master weights become parameters, and gradients remain sums."""
    key, shift = value
    if key[:2] == ("flat", "master") and target == flats[key[2]].dtype:
        return ("flat", "param", *key[2:]), shift
    return value if key[0] == "gradient" and target in _FLOATS else changed(value, "cast", target)


def represents(wide: str, narrow: str) -> bool:
    """Return whether a dtype has all numbers of another one."""
    return narrow in {wide, "bool"} or narrow in _EXACT.get(wide, "").split()


def sent(value: Value, wire: str) -> Value:
    """Return a value after it was sent in another dtype; gradients remain sums."""
    is_sum = value[0][0] == "gradient" and wire in _FLOATS
    return value if is_sum else changed(value, "wire", wire)


def without_axes(terms: Key) -> Key:
    """Return the terms of a sum over whatever ranks."""
    own = ("gradient", "", tuple((source, (), n) for source, _, n in terms)), 0
    summed: Key = total((("gradient", "", ()), 0), own, "")[0][2]
    return summed


def total(one: Value, other: Value, dtype: str) -> Value:
    """Return a sum of two values; that of two gradients, or of two weights, has the terms of both."""
    if ZERO in (one, other):
        return other if one == ZERO else one
    (left, shift), (right, there) = one, other
    if left[0] == "gradient" or right[0] == "gradient" or left[0] == right[0] == "weight":
        require((left[:-1], shift) == (right[:-1], there), "adds a gradient to something else")
        counts: dict[Any, int] = {}
        for source, axes, times in (*left[-1], *right[-1]):
            counts[source, axes] = counts.get((source, axes), 0) + times
        return (*left[:-1], tuple(sorted((*term, n) for term, n in counts.items()))), shift
    is_alike = left[0] in {"value", "made"} and left[-1] == right[-1]
    return made(("add", dtype, left, right, there - shift), shift, left[-1] if is_alike else ())


def over_ranks(values: list[Value], place: int, axis: str, reduction: str) -> Value:
    """Return what the rank at a place of an axis gets where the values of all ranks there are combined."""
    key, shift = values[place]
    is_alike, is_sum = all(v == values[place] for v in values), reduction == "sum"
    if any(v[0][0] == "gradient" for v in values) or (is_sum and key[0] == "weight"):
        require(is_alike and is_sum, "combines gradients of different elements")
        return (*key[:-1], tuple((s, (*axes, axis), n) for s, axes, n in key[-1])), shift
    if is_alike and (key == ZERO[0] or (is_sum and key[0] in {"value", "made"})):
        return (
            values[place] if key == ZERO[0] else made(("sum", axis, key), shift, (*key[-1], axis))
        )
    return made((reduction, axis, *((k, s - shift) for k, s in values)), shift)


def from_rank(value: Value, axis: str, place: int) -> Value:
    """Return a value of the rank at a place of an axis, as the other ranks have it."""
    key = value[0]
    is_alike = key[0] in {"zero", "flat"}
    if key[0] in SUMS:
        is_alike = all(axis in axes for _, axes, _ in key[-1])
    elif key[0] in {"value", "made"}:
        is_alike = axis in key[-1]
    return value if is_alike else changed(value, "from", axis, place)


def received(op: FileRecord, axis: str, sources: list[Pieces], place: int) -> Pieces:
    """Return what a rank at a place of an axis gets from what the ranks there send."""
    if op.kind == "Broadcast":
        require(0 <= op.root < len(sources), "is from a rank that does not exist")
        return [(a, b, from_rank(v, axis, op.root)) for a, b, v in sources[op.root]]
    if op.kind in GATHERS:
        numel = sources[0][-1][1] if sources[0] else 0
        every = [
            (i * numel + a, i * numel + b, moved(from_rank(v, axis, i), -i * numel))
            for i, pieces in enumerate(sources)
            for a, b, v in pieces
        ]
        return merged(every)
    reduced = [(a, b, over_ranks(v, place, axis, op.reduction)) for a, b, v in aligned(*sources)]
    if op.kind == "AllReduce":
        return reduced
    numel = (reduced[-1][1] if reduced else 0) // len(sources)
    start, stop = place * numel, (place + 1) * numel
    own = [(max(a, start), min(b, stop), v) for a, b, v in reduced if a < stop and b > start]
    return [(a - start, b - start, moved(v, start)) for a, b, v in own]


def parts(flat: FileRecord, start: int, stop: int) -> Iterator[tuple[int, int, FileRecord | None]]:
    """Yield the parts of a range of a flat: those of parameters, and with None those of padding."""
    for slot in sorted(flat.slots, key=lambda s: s.offset):
        low, high = max(slot.offset, start), min(slot.offset + slot_numel(slot), stop)
        if low < high:
            if start < low:
                yield start, low, None
            yield low, high, slot
            start = high
    if start < stop:
        yield start, stop, None


def is_own(quantity: str) -> bool:
    """Whether a quantity of a flat has other elements than its parameters."""
    return quantity in {"factors", "preconditioners"} or quantity.endswith("_absmax")


class Claims:
    """The contents of a certificate, as each rank has them, and what the numbers in them stand for."""

    def __init__(self, contents: list[Any]) -> None:
        self.contents = contents
        self.meanings: dict[tuple[Key, int], Key] = {}
        self.of_rank: dict[Key, bool] = {}
        """Whether a number means something on each rank."""
        self.of_section: dict[tuple[Key, int], Key] = {}
        """The same for numbers that are names, which mean another thing in each section."""
        self.numbers = Numbers()

    def pieces(self, names: Declarations, claim: Claim, rank: int) -> Pieces:
        """Return what a claim says that a region holds on a rank."""
        found: Pieces = []
        start = 0
        for stop, index in claim:
            require(0 <= index < len(self.contents) and start < stop, "a claim has no content")
            found += self._content(names, index, rank, start, stop)
            start = stop
        return merged(found)

    def _content(self, names: Declarations, index: int, rank: int, start: int, stop: int) -> Pieces:
        kind, *rest = self.contents[index]
        shift = 0
        if kind in _PLACED or kind == "slice":
            *rest, shift, strides = rest
            shift += sum(step * names.coordinate(rank, axis) for axis, step in strides)
        if kind != "slice":
            return [(start, stop, ((kind, *map(_fixed, rest)), shift))]
        found: Pieces = []
        ends = [b for _, b, _ in rest[0]]
        require(
            all(e <= a for e, (a, _, _) in zip(ends, rest[0][1:], strict=False)), "pieces overlap"
        )
        for a, b, inner in rest[0]:
            low, high = max(a, start + shift), min(b, stop + shift)
            require(inner < index, "a content consists of itself")
            if low < high:
                pieces = self._content(names, inner, rank, low, high)
                found += [(x - shift, y - shift, moved(v, shift)) for x, y, v in pieces]
        require(sum(y - x for x, y, _ in found) == stop - start, "a claim says nothing of elements")
        return found

    def agree(self, claimed: Value, value: Value, rank: int) -> None:
        """Require that a claim is a value, or a number that stands for it and for nothing else."""
        (key, shift), (wanted, there) = claimed, value
        if wanted[0] == "made":
            require(
                key[0] == "value" and (key[-1], shift) == (wanted[-1], there),
                f"leaves {text(claimed)}",
            )
            self.mean(key, rank, wanted[1])
        else:
            require(claimed == value, f"leaves {text(value)}, and by its claim {text(claimed)}")

    def mean(self, key: Key, rank: int, meaning: Key) -> None:
        """Let a number stand for one function of what a rank has; a statistic, for what it read on each rank.

        Names stand for something else in each section.
        """
        meanings = self.of_section if isinstance(key[1], str) else self.meanings
        is_named = meanings is self.of_section
        is_sum = meaning[0] == "sum" and meaning[2][1] == key[1]
        is_so = not is_named or is_sum or meaning[0] in OF_SECTION
        require(is_so, f"{key[1]} is not what it seems to be")
        require(is_named or self._is_global(meaning), "is made of what is decided")
        is_of_rank = meaning[0] in OF_RANK
        is_one = self.of_rank.setdefault(key, is_of_rank) == is_of_rank or is_named
        own = (key, rank if is_of_rank else -1)
        is_one &= meanings.setdefault(own, meaning) == meaning
        require(is_one, f"{text((key, 0))} means two things")

    def _is_global(self, what: object) -> bool:
        """Whether something is made of nothing that is another thing in each section."""
        if isinstance(what, tuple):
            if what[:1] == ("value",) and isinstance(what[1], str):
                return self.of_section.get((what, -1), "")[:1] in {("entry",), ("sum",)}
            return all(self._is_global(part) for part in what)
        return True

    def meaning(self, key: Key, rank: int = -1) -> Key:
        """Return what a number stands for."""
        meanings = self.of_section if isinstance(key[1], str) else self.meanings
        return meanings.get((key, -1)) or meanings.get((key, rank), ("nothing",))


def _fixed(value: object) -> object:
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


def text(value: Value) -> str:
    """Return a value for a message."""
    return " ".join(map(str, value[0]))[:200]
