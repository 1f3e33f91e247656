"""The values that a forward saves for its backward, and those that the backward recomputes: a minimum cut.

Every storage that the backward needs is either saved, at the cost of its bytes, or recomputed from others that are
available. The cheapest choice is a minimum cut of a graph in which a storage is an edge with its bytes as capacity, and
a cheap op a node that connects its result to its operands; among choices of equal bytes the one with the fewest ops
wins. The network is that of PyTorch's ``min_cut_rematerialization_partition`` (torch/_functorch/partitioners.py), with
the cost of computing in the network instead of in separate rules.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import networkx

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.passes.common.prune import Pruned, measured, prune, renumbered
from zeroir.passes.common.storages import (
    PRODUCT,
    Recipe,
    SegmentPair,
    Storages,
    StorageView,
    Use,
    numbered,
)


@dataclass(frozen=True, slots=True)
class FromBackward:
    """An input of the new backward that is the old one's at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class FromInput:
    """An input of the new backward that is an input of the forward, from ``offset`` elements on."""

    position: int
    offset: int


@dataclass(frozen=True, slots=True)
class FromOutput:
    """An input of the new backward that is an output of the new forward, from ``offset`` elements on."""

    position: int
    offset: int


Source = FromBackward | FromInput | FromOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RecutPair:
    """The new segments, with the names of the old ones.

    ``inputs`` and ``outputs`` are the old positions of those of the forward, None for a new output; ``sources`` are the
    sources of the inputs of the backward.
    """

    forward: Segment
    backward: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    sources: tuple[Source, ...]


def choose(pair: SegmentPair) -> RecutPair | None:
    """Return the choice that saves the fewest bytes; None if nothing is to be recomputed."""
    storages = Storages(pair)
    computed = _computed(storages)
    if not computed and not _is_unread(pair):
        return None
    return _Rewriter(pair, storages, computed).choice()


def _is_unread(pair: SegmentPair) -> bool:
    """Return whether the forward has an output without a reader."""
    read = {need.value for need in pair.needs if need is not None}
    outputs = zip(pair.forward.outputs, pair.uses, strict=True)
    return any(use is Use.NOBODY and value not in read for value, use in outputs)


# ------------------------------------------------------------------------------------------------------------ cut


def _computed(storages: Storages) -> frozenset[int]:
    """Return the storages to recompute: those on the near side of the minimum cut that something needs."""
    graph = networkx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    wanted = [root for root in storages.wanted if not storages.is_there(root)]
    graph.add_edges_from((("kept", root), _SINK) for root in wanted)
    # An op counts less than any byte, and so do all of them together.
    unit = 2 * len(storages.nodes) + 1
    pending, seen = list(wanted), set(wanted)
    while pending:
        root = pending.pop()
        price, recipe = storages.price_bytes(root), storages.recipe(root)
        limit = {} if price is None else {"capacity": price * unit}
        graph.add_edge(("made", root), ("kept", root), **limit)
        if recipe is None:
            graph.add_edge(_SOURCE, ("made", root))
            continue
        op = ("op", recipe.op)
        graph.add_edge(op, ("made", root))
        graph.add_edge(_SOURCE, op, capacity=len(recipe.nodes))
        for operand in _operands(storages, recipe):
            graph.add_edge(("kept", operand), op)
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    _, (_, near) = networkx.minimum_cut(graph, _SOURCE, _SINK)
    computed: set[int] = set()
    pending = wanted
    while pending:
        root = pending.pop()
        recipe = storages.recipe(root)
        if recipe is not None and root not in computed and ("made", root) in near:
            computed.add(root)
            pending += _operands(storages, recipe)
    return frozenset(computed)


_SOURCE: Final = "source"
_SINK: Final = "sink"


def _operands(storages: Storages, recipe: Recipe) -> list[int]:
    """Return the storages that a recipe needs and that are not available anyway."""
    roots = dict.fromkeys(storages.place(value).root for value in recipe.uses)
    return [root for root in roots if not storages.is_there(root)]


# ------------------------------------------------------------------------------------------------------- rewriting


_Key = tuple[str, int]
"""A value of the new backward: an input of its own, one of the old backward's, one of the forward's, or a product."""


class _Rewriter:
    """Builds the segments of a choice."""

    def __init__(self, pair: SegmentPair, storages: Storages, computed: frozenset[int]) -> None:
        self._pair = pair
        self._storages = storages
        self._computed = computed
        self._saved = self._find_saved()
        self._ends = self._find_ends()
        self._positions = {
            storages.place(value).root: position
            for position, (value, old) in reversed(list(enumerate(self._ends)))
            if old is None or storages.outputs.get(storages.place(value).root) == old
        }
        self._sources: dict[tuple[Source, TensorType], _Key] = {}
        self._nodes: list[tuple[Node, Mapping[int, _Key], Sequence[_Key]]] = []
        self._made: set[_Key] = set()

    def choice(self) -> RecutPair:
        """Return the new segments."""
        forward, inputs = self._forward()
        return RecutPair(
            forward=forward,
            backward=self._backward(),
            inputs=inputs,
            outputs=tuple(old for _, old in self._ends),
            sources=tuple(source for source, _ in self._sources),
        )

    # --------------------------------------------------------------------------------------------------- forward

    def _find_saved(self) -> frozenset[int]:
        """Return the storages computed by the forward that the new backward reads."""
        storages = self._storages
        used = {storages.place(v).root for root in self._computed for v in self._recipe(root).uses}
        return (
            frozenset(
                root
                for root in used | storages.wanted.keys() - self._computed
                if root >= storages.inputs
            )
            - self._computed
        )

    def _recipe(self, root: int) -> Recipe:
        recipe = self._storages.recipe(root)
        assert recipe is not None  # Only a storage with a recipe is recomputed.
        return recipe

    def _find_ends(self) -> list[tuple[int, int | None]]:
        """Return the new outputs of the forward, and their old positions."""
        storages = self._storages
        ends: list[tuple[int, int | None]] = []
        for position, value in enumerate(self._pair.forward.outputs):
            place = storages.places[value]
            is_for_backward = (
                self._pair.uses[position] is Use.NOBODY
                and place is not None
                and storages.is_all(place)
            )
            if not is_for_backward or (
                place is not None
                and place.root in self._saved
                and storages.outputs[place.root] == position
            ):
                ends.append((value, position))
        ends += [(root, None) for root in self._saved if root not in storages.outputs]
        return sorted(ends, key=lambda end: (end[0], -1 if end[1] is None else end[1]))

    def _forward(self) -> Pruned:
        """Return the forward with its new outputs, pruned to what they need, and the remaining inputs."""
        return prune(self._pair.forward, [value for value, _ in self._ends])

    # -------------------------------------------------------------------------------------------------- backward

    def _backward(self) -> Segment:
        """Return the backward, in which each recomputed value precedes its first use."""
        old = self._pair.backward
        # Inputs that it still reads come first, in their old order.
        for value, need in enumerate(self._pair.needs):
            if need is None or self._storages.place(need.value).root not in self._computed:
                self._old(value)
        for first, node in numbered(old):
            keys = {ref.index: self._old(ref.index) for ref in node.refs()}
            self._add(node, keys, [("backward", first + i) for i in range(len(node.results))])
        ends = [self._old(value) for value in old.outputs]
        if not old.nodes:
            # A call that repeats the forward takes the same arguments in the same order.
            self._sources = dict(sorted(self._sources.items(), key=_source_order))
        numbers = {key: i for i, key in enumerate(self._sources.values())}
        nodes: list[Node] = []
        for node, uses, results in self._nodes:
            nodes.append(renumbered(node, {index: numbers[key] for index, key in uses.items()}))
            for key in results:
                numbers[key] = len(numbers)
        segment = replace(
            old,
            inputs=tuple(kind for _, kind in self._sources),
            nodes=tuple(nodes),
            outputs=tuple(numbers[key] for key in ends),
        )
        return measured(segment)

    def _old(self, value: int) -> _Key:
        """Return a value of the old backward."""
        old, storages = self._pair.backward, self._storages
        if value >= len(old.inputs):
            return ("backward", value)
        need, kind = self._pair.needs[value], old.inputs[value]
        if need is None:
            return self._source(FromBackward(value), kind)
        place = storages.place(need.value)
        if place.root in storages.wanted:
            return self._looked_at(StorageView(place.root, need.offset, kind))
        if need.value < storages.inputs:
            return self._source(FromInput(need.value, need.offset), kind)
        return self._source(FromBackward(value), kind)

    def _looked_at(self, place: StorageView) -> _Key:
        """Return a part of a storage that the forward computes."""
        if place.root not in self._computed:
            return self._source(FromOutput(self._positions[place.root], place.offset), place.kind)
        shown = self._storages.shown(place)
        if isinstance(shown, int):
            return self._forwards(shown)
        assert shown is not None  # otherwise it would have no recipe
        shape, order = shown
        kind = TensorType(dtype=place.kind.dtype, shape=shape, stride=contiguous_stride(shape))
        viewed = self._between(
            "aten.view.default", (Ref(0), shape), self._forwards(place.root), kind
        )
        if order == tuple(range(len(order))):
            return viewed
        return self._between("aten.permute.default", (Ref(0), order), viewed, place.kind)

    def _forwards(self, value: int) -> _Key:
        """Return a value of the forward, after its operands; chains may be longer than Python's stack is deep."""
        key: _Key | None = None
        stack = [self._making(value)]
        while stack:
            try:
                operand = stack[-1].send(key)
            except StopIteration as made:
                key = made.value
                stack.pop()
            else:
                key = None
                stack.append(self._making(operand))
        assert key is not None  # The last one to end was the value's own.
        return key

    def _making(self, value: int) -> Generator[int, _Key | None, _Key]:
        """Compute a value of the forward: yield each value that it needs, receive its key, and return the own key."""
        storages = self._storages
        key = ("forward", value)
        if key in self._made:
            return key
        place = storages.place(value)
        if place.root not in self._computed:
            is_whole = place.is_same(storages.place(place.root))
            if place.root >= storages.inputs:
                return self._source(
                    FromOutput(self._positions[place.root], place.offset), place.kind
                )
            if is_whole or not self._pair.is_parameter[place.root]:
                return self._source(FromInput(place.root, place.offset), place.kind)
        elif value == place.root:
            nodes = self._recipe(value).nodes
            if len(nodes) > 1:
                # Two nodes compute it together.
                product_node, scaled_node = nodes
                product = ("product", value)
                yield from self._adding(product_node, {}, [product])
                yield from self._adding(scaled_node, {PRODUCT.index: product}, [key])
                return key
        first, node = storages.nodes[storages.makers[value]]
        results = [("forward", first + i) for i in range(len(node.results))]
        yield from self._adding(node, {}, results)
        return key

    def _adding(
        self, node: Node, given: Mapping[int, _Key], results: Sequence[_Key]
    ) -> Generator[int, _Key | None, None]:
        """Add a node of the forward: yield each value that it needs except those given, and receive its key."""
        keys = dict(given)
        for ref in node.refs():
            if ref.index not in given:
                key = yield ref.index
                assert key is not None  # The caller sends the key of each value that is yielded.
                keys[ref.index] = key
        self._add(node, keys, results)

    def _between(self, op: str, args: tuple[NodeArg, ...], source: _Key, kind: TensorType) -> _Key:
        key = ("between", len(self._nodes))
        self._add(Node(op=op, args=args, results=(kind,)), {0: source}, [key])
        return key

    def _source(self, source: Source, kind: TensorType) -> _Key:
        return self._sources.setdefault((source, kind), ("input", len(self._sources)))

    def _add(self, node: Node, keys: Mapping[int, _Key], results: Sequence[_Key]) -> None:
        self._nodes.append((node, keys, results))
        self._made.update(results)


def _source_order(item: tuple[tuple[Source, TensorType], _Key]) -> tuple[int, int, int]:
    """Sort inputs of the old backward first, then those of the forward, then the forward's outputs, each in order."""
    match item[0][0]:
        case FromBackward(position=position):
            return 0, position, 0
        case FromInput(position=position, offset=offset):
            return 1, position, offset
        case FromOutput(position=position, offset=offset):
            return 2, position, offset
