"""The storages of a forward segment: which the backward needs, the bytes to save them, and the ops to recompute them.

A value is a part of a storage. A view costs nothing once its storage is available.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.ir.segments.views import parts

CHEAP: Final = frozenset(
    """
    _fused_rms_norm _to_copy abs acos acosh add addcdiv addcmul alias arange asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor cat ceil celu clamp clamp_max clamp_min clone constant_pad_nd copy copysign cos
    cosh div elu eq erf erfc exp exp2 expm1 fill floor floor_divide fmax fmin fmod full full_like ge gelu glu gt
    hardsigmoid hardswish hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mish mul native_layer_norm ne neg new_full new_ones
    new_zeros ones ones_like pow reciprocal relu remainder repeat round rsqrt rsub scalar_tensor sgn sigmoid sign silu
    sin sinh softplus softshrink sqrt stack sub tan tanh threshold tril triu trunc where xlogy zeros zeros_like
    """.split()  # noqa: SIM905  a list of them is a page long
)
"""ATen's ops that cost little more than reading and writing their tensors once: element by element, moving elements,
constants, and norms over the last dimensions, which one kernel computes. No matrix products, no other reductions,
nothing random."""


_DROPOUT: Final = "zeroir.dropout.default"


class Use(Enum):
    """The readers of an output of the forward apart from its backward; only backwards keep it alive until then."""

    BACKWARDS = "backwards"
    OTHERS = "others"
    NOBODY = "nobody"


class Need(NamedTuple):
    """An input of the backward that is a view of the storage of the forward's value from ``offset`` on."""

    value: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPair:
    """A forward segment and its backward.

    ``leaves`` are for each input of the forward the bytes to keep it for the backward, None if that is impossible;
    ``is_parameter`` says which of them are parameters. ``uses`` says who else reads each output, and ``needs`` which
    value of the forward each input of the backward is, None if it is none of them. With ``computes_all`` every op of
    the forward may be recomputed, otherwise only cheap ones.
    """

    forward: Segment
    backward: Segment
    leaves: tuple[int | None, ...]
    is_parameter: tuple[bool, ...]
    uses: tuple[Use, ...]
    needs: tuple[Need | None, ...]
    computes_all: bool = False


class StorageView(NamedTuple):
    """A value as a part of a storage."""

    root: int
    offset: int
    kind: TensorType

    def is_same(self, other: StorageView) -> bool:
        """Return whether the two are the same elements in the same order."""
        return (self.root, self.offset) == (other.root, other.offset) and _layout(
            self.kind
        ) == _layout(other.kind)


class Recipe(NamedTuple):
    """Nodes that compute a storage, and the forward's values that they use. ``op`` distinguishes recipes."""

    op: tuple[int, int]
    nodes: tuple[Node, ...]
    uses: tuple[int, ...]


PRODUCT: Final = Ref(-1)
"""The reference of a recipe's second node to the result of its first node."""


class Storages:
    """The storages of a forward segment, and the ways to provide each of them in the backward."""

    def __init__(self, pair: SegmentPair) -> None:
        self.pair = pair
        forward = pair.forward
        self.inputs = len(forward.inputs)
        self.nodes = list(numbered(forward))
        self.places: list[StorageView | None] = [
            StorageView(i, 0, kind) for i, kind in enumerate(forward.inputs)
        ]
        self.makers: dict[int, int] = {}
        for at, (first, node) in enumerate(self.nodes):
            self.makers.update(dict.fromkeys(range(first, first + len(node.results)), at))
            self.places += self._places(first, node)
        # For every storage an output that is all of it, preferably one that is kept in any case.
        self.outputs: dict[int, int] = {}
        order = sorted(range(len(pair.uses)), key=lambda o: list(Use).index(pair.uses[o]))
        for position in order:
            place = self.places[forward.outputs[position]]
            if place is not None and self.is_all(place):
                self.outputs.setdefault(place.root, position)
        self.wanted = self._wanted()
        self.recipes: dict[int, Recipe | None] = {}

    def _places(self, first: int, node: Node) -> Iterator[StorageView | None]:
        source = node.args[0] if node.args else None
        seen = self.places[source.index] if isinstance(source, Ref) else None
        views = None if seen is None else parts(node, seen.kind)
        if seen is not None and views is not None:
            for (offset, _), kind in zip(views, node.results, strict=True):
                assert kind is not None  # A view has elements.
                yield StorageView(seen.root, seen.offset + offset, kind)
            return
        for i, result in enumerate(node.results):
            yield None if result is None else StorageView(first + i, 0, result)

    def place(self, value: int) -> StorageView:
        """Return a used value as a part of a storage."""
        place = self.places[value]
        assert place is not None  # Nothing can use what is undefined.
        return place

    def is_all(self, place: StorageView) -> bool:
        """Return whether a value is all of a storage that the segment computes."""
        whole = self.place(place.root).kind
        is_as_long = place.offset == 0 and place.kind.numel == whole.numel
        return place.root >= self.inputs and is_as_long and place.kind.is_dense and whole.is_dense

    def _wanted(self) -> dict[int, list[StorageView]]:
        """Return the storages computed here that the backward needs, and its views of them."""
        wanted: dict[int, list[StorageView]] = {}
        for need, kind in zip(self.pair.needs, self.pair.backward.inputs, strict=True):
            if need is not None and self.is_all(place := self.place(need.value)):
                looked_at = StorageView(place.root, need.offset, kind)
                wanted.setdefault(place.root, []).append(looked_at)
        return wanted

    def is_there(self, root: int) -> bool:
        """Return whether a storage is available in the backward, for any choice."""
        if root < self.inputs:
            return self.pair.leaves[root] == 0
        return root in self.outputs and self.pair.uses[self.outputs[root]] is Use.BACKWARDS

    def price_bytes(self, root: int) -> int | None:
        """Return the bytes to save a storage, None if it cannot be saved."""
        if root < self.inputs:
            return self.pair.leaves[root]
        kind = self.place(root).kind
        return kind.size_bytes if kind.is_dense else None

    def recipe(self, root: int) -> Recipe | None:
        """Return the nodes that recompute a storage; None if they cost too much, or no view of it matches."""
        if root not in self.recipes:
            self.recipes[root] = self._recipe(root)
        return self.recipes[root]

    def _recipe(self, root: int) -> Recipe | None:
        if root < self.inputs or any(self.shown(p) is None for p in self.wanted.get(root, ())):
            return None
        at = self.makers[root]
        first, node = self.nodes[at]
        namespace, name, _ = node.op.split(".", 2)
        is_cheap = namespace == "aten" and name in CHEAP
        nodes: tuple[Node, ...] | None = (node,) if is_cheap or self.pair.computes_all else None
        if root == first and nodes is None:
            x = node.args[0] if node.args else None
            if isinstance(x, Ref) and self.place(x.index).kind == node.results[0]:
                nodes = dropout_applied(node, Ref(first + 1), PRODUCT)
        if nodes is None:
            return None
        refs = (ref.index for node in nodes for ref in node.refs() if ref != PRODUCT)
        return Recipe((at, len(nodes)), nodes, tuple(dict.fromkeys(refs)))

    def shown(self, place: StorageView) -> int | tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return a value that is this view, or a shape and an order of dimensions that create it from the storage."""
        for value, candidate in enumerate(self.places):
            if candidate is not None and candidate.is_same(place):
                return value
        kind, whole = place.kind, self.place(place.root).kind
        order = sorted(range(len(kind.shape)), key=lambda d: (-kind.stride[d], kind.shape[d], d))
        viewed = TensorType(
            dtype=kind.dtype,
            shape=tuple(kind.shape[d] for d in order),
            stride=tuple(kind.stride[d] for d in order),
        )
        is_view = place.offset == 0 and kind.numel == whole.numel
        if not (is_view and whole.is_contiguous and viewed.is_contiguous):
            return None
        return viewed.shape, tuple(order.index(d) for d in range(len(order)))


def numbered(segment: Segment) -> Iterator[tuple[int, Node]]:
    """Yield every node with the number of its first result."""
    first = len(segment.inputs)
    for node in segment.nodes:
        yield first, node
        first += len(node.results)


def _layout(kind: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides, ignoring strides of dimensions of one element."""
    steps = (step if size > 1 else 0 for size, step in zip(kind.shape, kind.stride, strict=True))
    return kind.shape, tuple(steps)


def dropout_applied(node: Node, mask: NodeArg, product: Ref) -> tuple[Node, Node] | None:
    """Return the first result of a dropout, ``x * mask * 1 / (1 - p)``, as two nodes; None for any other node.

    ``mask`` refers to the dropout's second result and ``product`` to that of the first of the two nodes.
    """
    if node.op != _DROPOUT or len(node.args) != 3 or node.kwargs:
        return None
    x, p, _ = node.args
    kind = node.results[0]
    if not isinstance(p, int | float) or kind is None:
        return None
    scale = 0.0 if p >= 1 else 1 / (1 - p)
    return (
        _product(x, mask, kind, node.source),
        _product(product, scale, kind, node.source),
    )


def _product(left: NodeArg, right: NodeArg, kind: TensorType, source: str) -> Node:
    return Node(op="aten.mul.Tensor", args=(left, right), results=(kind,), source=source)
