"""Value numbers of the results of segments: equal numbers mean equal values, in whichever buffers they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.ir.segments.views import parts
from zeroir.verify.interpreter.domain import Numbering


class CallOperand(NamedTuple):
    """The content of an argument's region: its element ``p`` is element ``p + shift`` of the storage named ``key``."""

    key: Hashable
    shift: int = 0


class Result(NamedTuple):
    """A result: the number of its value, and its storage and place there in the form of operands."""

    number: int
    key: int
    shift: int


class Segments:
    """Numbers the outputs of calls, from the operands and the segment's digest, or from each node of the segment.

    Numbering by node is finer and slower. Its numbers do not change where a segment is split in two, where its outputs
    are selected anew, or where it repeats a computation of another one. A view is numbered by its storage and its place
    there, so it has the same number whether a segment creates or receives it.
    """

    def __init__(self, program: Program, numbering: Numbering, *, by_node: bool) -> None:
        self._segments = program.segment_by_name
        self._numbering = numbering
        self._by_node = by_node
        self._digests: dict[str, str] = {}
        self._results: dict[tuple[str, int], tuple[Result, ...]] = {}
        # the layout of each computed storage, as its operator created it
        self._homes: dict[int, int] = {}

    def results(self, name: str, operands: tuple[CallOperand, ...]) -> tuple[Result, ...]:
        """Return the outputs of the segment."""
        digest = self._digests.get(name)
        if digest is None:
            digest = self._digests[name] = self._segments[name].digest()
        call = self._numbering.of((digest, operands))
        results = self._results.get((digest, call))
        if results is None:
            segment = self._segments[name]
            if self._by_node:
                prepared = self._numbering.prepared.get(digest)
                if not isinstance(prepared, _PreparedSegment):
                    prepared = _PreparedSegment(segment, self._numbering)
                    self._numbering.prepared[digest] = prepared
                results = prepared.results(operands, self._homes)
            else:
                numbers = [self._numbering.of((call, i)) for i in range(len(segment.outputs))]
                results = tuple(Result(number, number, 0) for number in numbers)
            self._results[digest, call] = results
        return results


class _NumberedNode(NamedTuple):
    """A node: the number of everything but its operands, and the indices of the values that it uses and computes."""

    node: int
    uses: tuple[int, ...]
    makes: tuple[int, ...]


class _ValuePlace(NamedTuple):
    """A value as part of a storage: the value that owns the storage, the offset there, and the number of its layout."""

    root: int
    offset: int
    layout: int


class _PreparedSegment:
    """A segment prepared for numbering: everything that does not depend on the operands."""

    def __init__(self, segment: Segment, numbering: Numbering) -> None:
        self._of = numbering.of
        self._inputs = len(segment.inputs)
        self._outputs = segment.outputs
        self._steps: list[_NumberedNode] = []
        self._places = [
            _ValuePlace(i, 0, self._layout(kind)) for i, kind in enumerate(segment.inputs)
        ]
        types = segment.types()
        self._places += [
            _ValuePlace(i, 0, -1 if kind is None else self._layout(kind))
            for i, kind in enumerate(types[self._inputs :], self._inputs)
        ]
        # Without elements there is no memory to share: such values are equal where their types are.
        self._empty = {
            i: self._of(("empty", kind.dtype, self._layout(kind)))
            for i, kind in enumerate(types)
            if kind is not None and kind.numel == 0
        }
        first = self._inputs
        for node in segment.nodes:
            self._add(node, first, types)
            first += len(node.results)

    def _add(self, node: Node, first: int, types: tuple[TensorType | None, ...]) -> None:
        source = node.args[0] if node.args else None
        seen = types[source.index] if isinstance(source, Ref) else None
        if isinstance(source, Ref) and seen is not None:
            views = parts(node, seen)
            if views is not None:
                parent = self._places[source.index]
                for i, (offset, kind) in enumerate(views, first):
                    place = _ValuePlace(parent.root, parent.offset + offset, self._layout(kind))
                    self._places[i] = place
                return
        makes = tuple(range(first, first + len(node.results)))
        product = len(self._places)
        applied = dropout_as_products(node, Ref(first + 1), Ref(product))
        if applied is None:
            self._steps.append(self._step(node, makes))
            return
        self._places.append(_ValuePlace(product, 0, self._places[first].layout))
        # The result of a dropout is numbered as the product with its mask.
        self._steps.append(self._step(node, (-1, first + 1)))
        self._steps.append(self._step(applied[0], (product,)))
        self._steps.append(self._step(applied[1], (first,)))

    def _step(self, node: Node, makes: tuple[int, ...]) -> _NumberedNode:
        return _NumberedNode(self._of(_shape(node)), tuple(ref.index for ref in node.refs()), makes)

    def _layout(self, kind: TensorType) -> int:
        """Return the number of a shape with its strides; strides of dimensions of one element do not matter."""
        steps = tuple(
            step if size > 1 else 0 for size, step in zip(kind.shape, kind.stride, strict=True)
        )
        return self._of(("layout", kind.shape, steps))

    def results(
        self, operands: tuple[CallOperand, ...], homes: dict[int, int]
    ) -> tuple[Result, ...]:
        """Return the outputs for these operands; ``homes`` receives the layouts of new storages."""
        of, places = self._of, self._places
        # For each value that owns a storage: the storage's number, and the offset of the value in it.
        bases: list[tuple[int, int]] = [(-1, 0)] * len(places)
        for i, (key, shift) in enumerate(operands):
            bases[i] = (key if isinstance(key, int) else of(("operand", key)), shift)
        numbers = dict(self._empty)

        def number(value: int) -> int:
            result = numbers.get(value)
            if result is None:
                root, offset, layout = places[value]
                base, start = bases[root]
                if start + offset == 0 and homes.get(base) == layout:
                    result = base
                else:
                    result = of(("view", base, start + offset, layout))
                numbers[value] = result
            return result

        for node, uses, makes in self._steps:
            made = of(("node", node, *[numbers.get(u) or number(u) for u in uses]))
            for i, value in enumerate(makes):
                if value >= 0:
                    base = of(("result", made, i)) if len(makes) > 1 else made
                    bases[value] = (base, 0)
                    homes[base] = places[value].layout
                    numbers.setdefault(value, base)
        outputs: list[Result] = []
        for value in self._outputs:
            if value in self._empty:
                outputs.append(Result(numbers[value], numbers[value], 0))
                continue
            root, offset, _ = places[value]
            base, start = bases[root]
            outputs.append(Result(number(value), base, start + offset))
        return tuple(outputs)


_DROPOUT: Final = "zeroir.dropout.default"


def dropout_as_products(node: Node, mask: Ref, product: Ref) -> tuple[Node, Node] | None:
    """Return the first result of a dropout as ``product = x * mask`` and ``product * (1 / (1 - p))``; otherwise None.

    A pass that recomputes only this result writes these nodes, by a rule of its own.
    """
    match node:
        case Node(op=op, args=(x, (int() | float()) as p, _), kwargs=(), results=(kind, *_)) if (
            op == _DROPOUT and kind is not None
        ):
            scale = 1 / (1 - p) if p < 1 else 0.0
            operands = ((x, mask), (product, scale))
        case _:
            return None
    first, second = (
        Node(op="aten.mul.Tensor", args=each, results=(kind,), source=node.source)
        for each in operands
    )
    return first, second


def _shape(node: Node) -> Hashable:
    """Return a node without its operands."""
    args = tuple(_fixed(arg) for arg in node.args)
    kwargs = tuple((name, _fixed(arg)) for name, arg in node.kwargs)
    return ("node", node.op, args, kwargs, node.results)


def _fixed(arg: NodeArg) -> Hashable:
    if isinstance(arg, Ref):
        return "value"
    if isinstance(arg, tuple):
        return tuple(_fixed(item) for item in arg)
    # 1, 1.0 and True are equal keys but different arguments, and so are 0.0 and -0.0.
    return (type(arg).__name__, repr(arg) if isinstance(arg, float) else arg)
