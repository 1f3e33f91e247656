"""Symbolic values: terms that are equal exactly if their texts are, and memory that holds pieces of them.

Element i of a piece ``(start, stop, term, shift)`` is element ``i + shift`` of the term. A term of one value
everywhere, such as zero, has shift 0. A gather thus concatenates pieces, and equal contents are equal pieces.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

Piece = tuple[int, int, int, int]
Pieces = tuple[Piece, ...]
Operand = tuple[int, int]
"""A term and a shift."""

UNDEFINED: Final = 0
ZERO: Final = 1

_WIDER: Final = {
    "f8_e4m3": {"f16", "bf16", "f32", "f64"},
    "f16": {"f32", "f64"},
    "bf16": {"f32", "f64"},
    "f32": {"f64"},
}
_BITS: Final = {"f8_e4m3": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def narrower(first: str, second: str) -> str:
    """Return the one of two dtypes that has fewer bits."""
    return first if _BITS.get(first, 99) <= _BITS.get(second, 99) else second


def is_exact(source: str | None, target: str) -> bool:
    """Whether each number of one dtype is one of the other."""
    return source is None or source == target or target in _WIDER.get(source, ())


class Terms:
    """All terms of a comparison; each is a number, and has a row: what it is made of.

    ``dtypes`` has the narrowest dtype that holds a term exactly, ``types`` the type of a tensor, ``flats`` the flat in
    whose coordinates its elements are counted. ``sums`` are gradients and weights; ``held`` says in which dtypes the
    logical program holds each of them.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.uniform: set[int] = set()
        self.dtypes: dict[int, str] = {}
        self.types: dict[int, tuple[Any, ...]] = {}
        self.flats: dict[int, str] = {}
        self.sums: set[int] = set()
        self.held: dict[int, set[str]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self.make("undefined", is_uniform=True)
        self.constant(0.0)

    def make(self, *row: object, dtype: str | None = None, is_uniform: bool = False) -> int:
        """Return the term that is made of these parts."""
        number = self._numbers.get(row)
        if number is None:
            number = self._numbers[row] = len(self.rows)
            self.rows.append(row)
            if dtype is not None:
                self.dtypes[number] = dtype
            if is_uniform:
                self.uniform.add(number)
        return number

    def constant(self, value: float) -> int:
        """Return the term of one number everywhere; both zeros are one."""
        return self.make("constant", repr(value + 0.0), is_uniform=True)

    def elementwise(
        self, key: tuple[object, ...], operands: Sequence[Operand], dtype: str | None
    ) -> Operand:
        """Return the term whose elements each depend on those of the operands at the same place."""
        base = next((shift for term, shift in operands if term not in self.uniform), None)
        row = tuple((t, None if t in self.uniform else s - (base or 0)) for t, s in operands)
        term = self.make("each", key, row, dtype=dtype, is_uniform=base is None)
        if any(t in self.sums for t, _ in operands):
            self.sums.add(term)
        return term, base or 0

    def cast(self, operand: Operand, dtype: str) -> Operand:
        """Return the value rounded to a dtype; unchanged where the logical program holds the same sum so."""
        term = operand[0]
        if term in (UNDEFINED, ZERO) or self.dtypes.get(term) in {None, dtype}:
            return operand
        if term in self.sums:
            parts = [t for _, t, _ in self.parts(term)] or [term]
            held = [[*self.held.get(t, ()), self.dtypes[t]] for t in parts]
            if all(any(is_exact(h, dtype) for h in of) for of in held):
                return operand
        rounded = self.elementwise(("cast", dtype), [operand], dtype)
        if term in self.flats:
            self.flats[rounded[0]] = self.flats[term]
        return rounded

    def narrowest(self, term: int) -> str | None:
        """Return the narrowest dtype in which the logical program holds a sum, or that of any other term."""
        held = self.held.get(term, set())
        return min(held, key=lambda d: _BITS.get(d, 99)) if held else self.dtypes.get(term)

    def parts(self, term: int) -> list[tuple[int, int, int | None]]:
        """Return the ranks' shares of a sum over ranks as rank, term and relative shift; none for other terms."""
        row = self.rows[term]
        return list(row[2]) if row[0] == "ranks" and row[1] is None else []

    def tidy(self, pieces: Pieces) -> Pieces:
        """Return a norm without its sources of zeros, and any other content as it is."""
        if len(pieces) != 1 or self.rows[pieces[0][2]][0] != "norm":
            return pieces
        sources = [source for source in self.rows[pieces[0][2]][1:] if source]
        return ((*pieces[0][:2], self.make("norm", *sources, dtype="f32"), 0),)

    def over_ranks(
        self, operands: Sequence[tuple[int, Operand]], wire: str | None, kind: str
    ) -> Operand:
        """Return the sum, or maximum, over ranks of an element each, added in the dtype ``wire``."""
        if any(term == UNDEFINED for _, (term, _) in operands):
            return UNDEFINED, 0
        if all(term == ZERO for _, (term, _) in operands):
            return ZERO, 0
        base: int | None = None
        shares: list[tuple[int, int, int | None]] = []
        tags: set[str | None] = set()
        for rank, (term, shift) in operands:
            of_term = self.parts(term)
            among = [r for r, _, _ in of_term]
            if among and max(among) - min(among) >= len(among):
                tags.add("outer ranks first")
            if not of_term:
                of_term = [(rank, term, None if term in self.uniform else 0)]
            if base is None and term not in self.uniform:
                base = shift
            for r, t, s in of_term:
                shares.append((r, t, None if s is None else s + shift - (base or 0)))
                narrow = self.narrowest(t)
                tags.add(None if wire in (None, narrow) or narrow is None else wire)
        if len(shares) == 1:
            return operands[0][1]
        shares.sort(key=lambda share: (share[0], share[1]))
        tag = None if tags == {None} and kind == "sum" else f"{kind} {wire}"
        dtype = self.narrowest(shares[0][1])
        term = self.make("ranks", tag, tuple(shares), dtype=dtype, is_uniform=base is None)
        if any(t in self.sums for _, t, _ in shares):
            self.sums.add(term)
        return term, base or 0

    def add(self, first: Operand, second: Operand, dtype: str) -> Operand:
        """Return the sum of two elements in a dtype; ranks may be summed before or after."""
        if first[0] == UNDEFINED or second[0] == UNDEFINED:
            return UNDEFINED, 0
        if first[0] == ZERO or second[0] == ZERO:
            return self.cast(second if first[0] == ZERO else first, dtype)
        one, other = self.parts(first[0]), self.parts(second[0])
        if one and [r for r, _, _ in one] == [r for r, _, _ in other]:
            shares = []
            for (rank, a, s), (_, b, z) in zip(one, other, strict=True):
                of_rank = self.add((a, (s or 0) + first[1]), (b, (z or 0) + second[1]), dtype)
                shares.append((rank, of_rank))
            return self.over_ranks(shares, None, "sum")
        operands = sorted([first, second])
        term, shift = self.elementwise(("add", dtype), operands, dtype)
        return term, shift


class PieceMemory:
    """The elements of a buffer on one rank, as pieces without gaps; at first they are undefined."""

    def __init__(self, numel: int, uniform: set[int]) -> None:
        self.numel = numel
        self.uniform = uniform
        self.pieces: list[Piece] = [(0, numel, UNDEFINED, 0)] if numel else []

    def read(self, start: int, stop: int) -> Pieces:
        """Return the pieces of a range, which begin at 0."""
        if len(self.pieces) == 1 and start == 0 and stop == self.numel:
            return (self.pieces[0],)
        found: list[Piece] = []
        index = max(bisect_right(self.pieces, start, key=lambda p: p[0]) - 1, 0)
        for a, b, term, shift in self.pieces[index:]:
            if a >= stop:
                break
            if b > start:
                moved = 0 if term in self.uniform else shift + start
                found.append((max(a, start) - start, min(b, stop) - start, term, moved))
        return tuple(found)

    def write(self, start: int, pieces: Iterable[Piece]) -> None:
        """Replace elements from ``start`` on by pieces, which begin at 0."""
        new = [
            (a + start, b + start, t, 0 if t in self.uniform else s - start)
            for a, b, t, s in pieces
            if a < b
        ]
        if not new:
            return
        stop = new[-1][1]
        left = [(a, min(b, start), t, s) for a, b, t, s in self.pieces if a < start]
        right = [(max(a, stop), b, t, s) for a, b, t, s in self.pieces if b > stop]
        self.pieces = list(merged([*left, *new, *right]))


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces with neighbours of one term joined."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last[1] == piece[0] and last[2:] == piece[2:]:
            last = (last[0], piece[1], *last[2:])
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def common(*contents: Pieces) -> Iterator[tuple[int, int, list[Operand]]]:
    """Yield the ranges in which each of several contents is one piece, with the terms there and their shifts."""
    edges = sorted({edge for pieces in contents for a, b, _, _ in pieces for edge in (a, b)})
    places = [0] * len(contents)
    for start, stop in itertools.pairwise(edges):
        operands: list[Operand] = []
        for i, pieces in enumerate(contents):
            while pieces[places[i]][1] <= start:
                places[i] += 1
            operands.append(pieces[places[i]][2:])
        yield start, stop, operands
