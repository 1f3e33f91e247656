"""Computes segments symbolically: each node is a function of its operands, of which nothing else is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.checker.reading import FileRecord
from tools.checker.terms import PieceMemory, Pieces, Terms
from tools.checker.views import seen


def layout(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return strides in which those of dimensions of one element are 0, because they do not matter."""
    return tuple(0 if size <= 1 else step for size, step in zip(shape, stride, strict=True))


def type_of(record: FileRecord) -> tuple[object, ...]:
    """Return dtype, shape and layout of a declared type."""
    return record.dtype, record.shape, layout(record.shape, record.stride)


def viewed(
    terms: Terms, pieces: Pieces, dtype: str, shape: Sequence[int], stride: Sequence[int]
) -> int:
    """Return the tensor that a region with this content is, seen with a shape and strides."""
    kind = (dtype, tuple(shape), layout(shape, stride))
    if len(pieces) == 1 and pieces[0][3] == 0 and terms.types.get(pieces[0][2]) == kind:
        return pieces[0][2]
    term = terms.make("view", pieces, *kind, dtype=dtype)
    terms.types[term] = kind
    return term


def stored(
    terms: Terms, term: int, numel: int, shape: Sequence[int], stride: Sequence[int]
) -> Pieces:
    """Return the content of a region to which a tensor is written with these strides."""
    kind = terms.types[term]
    wanted = layout(shape, stride)
    row = terms.rows[term]
    if row[0] == "view" and kind[2] == wanted:
        pieces: Pieces = row[1]
        return pieces
    if kind[2] != wanted:
        dtype = str(kind[0])
        term = terms.make("laid out", term, tuple(shape), wanted, dtype=dtype)
        terms.types[term] = (dtype, tuple(shape), wanted)
    return ((0, numel, term, 0),)


class SymbolicSegments:
    """The segments of a program; a call with known operands is computed once."""

    def __init__(self, terms: Terms, segments: dict[str, FileRecord]) -> None:
        self._terms = terms
        self._segments = segments
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def call(self, name: str, operands: tuple[int, ...]) -> list[int]:
        """Return the outputs of a segment for these operands."""
        key = (name, operands)
        if key not in self._known:
            self._known[key] = self._computed(self._segments[name], operands)
        return self._known[key]

    def _computed(self, segment: FileRecord, operands: tuple[int, ...]) -> list[int]:
        terms, values = self._terms, list(operands)
        for node in segment.nodes:
            kinds = tuple(None if r is None else type_of(r) for r in node.results)
            arguments = tuple(_bound(a, values) for a in node.args)
            view = self._viewed(node, arguments)
            if view is not None:
                values.append(view)
                continue
            keywords = tuple(sorted((k, _bound(a, values)) for k, a in node.kwargs))
            call = terms.make("node", node.op, repr((arguments, keywords)), kinds)
            for index, kind in enumerate(kinds):
                dtype = None if kind is None else str(kind[0])
                term = call if len(kinds) == 1 else terms.make("result", call, index, dtype=dtype)
                if kind is not None:
                    terms.types[term] = kind
                    terms.dtypes[term] = str(kind[0])
                values.append(term)
            if node.op == "zeroir.dropout.default" and node.args[1] < 1:
                values[-2] = self._dropped(arguments, kinds[0], values[-1])
        return [values[index] for index in segment.outputs]

    def _dropped(self, arguments: tuple[Any, ...], kind: tuple[Any, ...] | None, mask: int) -> int:
        """The first result of a dropout, as the two products that a backward computes again from the mask."""
        assert kind is not None
        (value, p, _), terms = arguments, self._terms
        product = terms.make("node", "aten.mul.Tensor", repr(((value, ("ref", mask)), ())), (kind,))
        factor = 1 / (1 - p)
        result = terms.make(
            "node", "aten.mul.Tensor", repr(((("ref", product), factor), ())), (kind,)
        )
        for term in (product, result):
            terms.types[term] = kind
            terms.dtypes[term] = str(kind[0])
        return result

    def _viewed(self, node: FileRecord, arguments: tuple[object, ...]) -> int | None:
        """The result of an operator that only sees its operand's memory in another way; None for others."""
        match arguments:
            case (("ref", int() as term), *rest) if not node.kwargs and len(node.results) == 1:
                dtype, shape, stride = self._terms.types[term]
                sight = seen(node.op, shape, stride, rest)
            case _:
                return None
        if sight is None or (dtype, tuple(sight[0]), layout(sight[0], sight[1])) != type_of(
            node.results[0]
        ):
            return None
        row = self._terms.rows[term]
        span = _span(shape, stride)
        pieces: Pieces = row[1] if row[0] == "view" else ((0, span, term, 0),)
        memory = PieceMemory(max(span, pieces[-1][1] if pieces else 0), self._terms.uniform)
        memory.write(0, pieces)
        found = memory.read(sight[2], sight[2] + _span(sight[0], sight[1]))
        return viewed(self._terms, found, dtype, sight[0], sight[1])


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last one of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _bound(argument: object, values: list[int]) -> object:
    match argument:
        case ("ref", int() as index):
            return "ref", values[index]
        case ("list", tuple() as items):
            return "list", tuple(_bound(item, values) for item in items)
    return argument
