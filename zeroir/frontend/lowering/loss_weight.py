"""The weight of a batch that follows from its loss: the number of elements that the loss is the mean over.

These are the labels of torch's ``cross_entropy`` or ``nll_loss`` without the ignored ones, all elements of another
mean, or the sum over the batch, such as that of a mask, that another sum is divided by. With that number as its weight,
batches count in the mean over a job as if one process computed the loss of all of them. It must follow from the batch
alone. Constant factors of the loss change nothing, and neither does label smoothing, whose terms are means over the
same labels.

A segment computes the weight; no op calls it::

    weight %batch_weight
    weighing @weight(%input.labels)
    segment @weight($0: i64[4,12]) {
      $1 = aten.view.default($0, (-1,)) -> i64[48]
      $2 = aten.ne.Scalar($1, -100) -> bool[48]
      $3 = aten.sum.default($2) -> i64[]
      return $3
    }
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroir.frontend.capture.joint_graph import InputKind, JointGraph, JointNode
from zeroir.frontend.lowering.segments import renumbered
from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType
from zeroir.ir.sizes import Size

USUAL_IGNORE_INDEX: Final = -100
"""The label that torch's losses ignore unless told otherwise."""

_NAME: Final = "weight"
_LOSSES: Final = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_MEAN, _SUM = 1, 2
_SAME: Final = frozenset(
    {
        "aten._to_copy.default",
        "aten.alias.default",
        "aten.clone.default",
        "aten.detach.default",
        "aten.reshape.default",
        "aten._reshape_copy.default",
        "aten._unsafe_view.default",
    }
)
"""Operators whose result has the values of their first argument, as views have."""

_SUMS: Final = frozenset({"aten.sum.default"})
_SELECTIONS: Final = _SAME | {"aten.constant_pad_nd.default"}
_MEANS: Final[Mapping[str, int | None]] = {
    "aten.mean.default": None,
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
}
"""Operators that return the mean of all elements of their first argument, if the argument at this position says so."""

_SCALINGS: Final = frozenset(
    {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.neg.default"}
)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The number of a value's elements other than one label."""

    value: int
    ignored: int


@dataclass(frozen=True, slots=True)
class _Total:
    """A value without dimensions, a sum over the batch."""

    value: int


@dataclass(frozen=True, slots=True)
class _CountedElements:
    """A number that depends on the sizes of the batch alone."""

    number: int


_Count = _Labels | _Total | _CountedElements


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeight:
    """The segment that computes a weight, and its inputs' paths in the batch.

    ``may_differ`` says whether batches are expected to differ in it, ``may_ever_differ`` whether they could.
    """

    segment: Segment
    paths: tuple[str, ...]
    may_differ: bool
    may_ever_differ: bool


def loss_weight(
    joint: JointGraph, example: Mapping[str, Tensor], *, is_near_1: bool = False
) -> LossWeight | None:
    """Return the weight of a batch that follows from the loss; None where the loss is not one such mean.

    ``example`` are the tensors of the example batch, by path.

    With ``is_near_1`` elements are counted in a unit, a power of 2, such that no weight is above 1: weights multiply
    gradients, and those of FP16 have few exponents.
    """
    graph = _Forward(joint, example)
    counts = set(graph.counts(joint.loss))
    if len(counts) != 1:
        return None
    (count,) = counts
    if count is None or not (isinstance(count, _CountedElements) or graph.is_of_batch(count.value)):
        return None
    segment, paths = _segment(graph, count, is_near_1=is_near_1)
    return LossWeight(
        segment=segment,
        paths=paths,
        may_differ=graph.may_differ(count),
        may_ever_differ=graph.may_ever_differ(count),
    )


def may_ignore_labels(joint: JointGraph, example: Mapping[str, Tensor]) -> bool:
    """Return whether the loss has a mean over labels of which batches may have different numbers."""
    graph = _Forward(joint, example)
    means = map(graph.labels_of, graph.nodes)
    return any(mean is not None and graph.may_differ(mean) for mean in means)


class _Forward:
    """The nodes before the loss, and what their values are made of."""

    def __init__(self, joint: JointGraph, example: Mapping[str, Tensor]) -> None:
        self.joint = joint
        self.example = example
        self.nodes = [node for node in joint.nodes if not node.is_backward]
        self.makers = {result: node for node in self.nodes for result in node.results}
        self.inputs = {item.value: item for item in joint.inputs}

    def counts(self, value: int) -> Iterator[_Count | None]:
        """Yield for each term of a linear combination what it is the mean over; None where it is no mean."""
        node = self.makers.get(value)
        if node is None:
            yield None
            return
        operands = [arg.index for arg in node.args if isinstance(arg, Ref)]
        if node.is_view or node.op in _SAME or (node.op in _SCALINGS and len(operands) == 1):
            yield from self.counts(operands[0])
        elif node.op in ("aten.add.Tensor", "aten.sub.Tensor") and len(operands) == 2:
            for operand in operands:
                yield from self.counts(operand)
        elif node.op in _LOSSES:
            # Where classes have weights, the loss is divided by theirs.
            yield self.labels_of(node) if node.args[2] is None else None
        elif node.op == "aten.div.Tensor":
            yield self._quotient(*operands)
        elif node.op in _MEANS:
            at = _MEANS[node.op]
            # Torch leaves out trailing arguments with their default, which is the mean.
            is_mean = at is None or len(node.args) <= at or node.args[at] == _MEAN
            yield _CountedElements(self._numel(operands[0])) if is_mean else None
        else:
            yield None

    def labels_of(self, node: JointNode) -> _Labels | None:
        """Return the labels of which a node computes the mean loss; None if it computes something else."""
        if node.op not in _LOSSES:
            return None
        _, labels, _, reduction, ignored = node.args
        assert isinstance(labels, Ref)
        assert isinstance(ignored, int)
        return _Labels(self._source(labels.index), ignored) if reduction == _MEAN else None

    def _quotient(self, dividend: int, divisor: int) -> _Count | None:
        """Return what a quotient is the mean over, where a sum is divided by a sum over the batch."""
        above = self.makers.get(self._source(dividend))
        below = self.makers.get(self._source(divisor))
        is_sum = above is not None and (
            above.op in _SUMS or (above.op in _LOSSES and above.args[3] == _SUM)
        )
        if not is_sum or below is None or below.op not in _SUMS:
            return None
        return self._labels_in(below) or _Total(below.results[0])

    def _labels_in(self, total: JointNode) -> _Labels | None:
        """Return the labels that a sum counts: those that differ from one, as label smoothing does."""
        compared, is_negated = self._operand(total), False
        if compared is not None and compared.op in (
            "aten.bitwise_not.default",
            "aten.logical_not.default",
        ):
            compared, is_negated = self._operand(compared), True
        if compared is None or compared.op != f"aten.{'eq' if is_negated else 'ne'}.Scalar":
            return None
        labels, ignored = compared.args
        if not isinstance(labels, Ref) or not isinstance(ignored, int):
            return None
        return _Labels(self._source(labels.index), ignored)

    def _operand(self, node: JointNode) -> JointNode | None:
        (first, *_) = node.args
        return self.makers.get(self._source(first.index)) if isinstance(first, Ref) else None

    def _source(self, value: int) -> int:
        """Return the value before copies and casts, and before views with as many elements."""
        node = self.makers.get(value)
        while node is not None and (node.is_view or node.op in _SAME):
            (first, *_) = node.args
            if not isinstance(first, Ref) or self._numel(first.index) != self._numel(value):
                break
            value = first.index
            node = self.makers.get(value)
        return value

    def type_of(self, value: int) -> TensorType:
        """Return the type of a value."""
        kind = self.joint.types[value]
        assert kind is not None
        return kind

    def most_summed(self, total: int) -> int:
        """Return the number of elements of which a value is the sum, at the most."""
        (summed,) = self.makers[total].refs()
        return int(self._numel(summed))

    def _numel(self, value: int) -> int:
        return self.type_of(value).numel

    def is_of_batch(self, value: int) -> bool:
        """Return whether a value is computed from the batch alone."""
        leaves = self.leaves(value)
        return bool(leaves) and all(
            item is not None and item.kind is InputKind.BATCH
            for item in map(self.inputs.get, leaves)
        )

    def leaves(self, value: int) -> set[int]:
        """Return the inputs that a value is computed from."""
        used = {ref for node in self.nodes_of(value) for ref in node.refs()} | {value}
        return {ref for ref in used if ref not in self.makers}

    def nodes_of(self, value: int) -> list[JointNode]:
        """Return the nodes that compute a value, in execution order."""
        needed, nodes = {value}, list[JointNode]()
        for node in reversed(self.nodes):
            if needed.intersection(node.results):
                nodes.append(node)
                needed.update(node.refs())
        return nodes[::-1]

    def may_differ(self, count: _Count) -> bool:
        """Return whether two batches are expected to have different counts.

        Labels of one size are taken to be ignored if the example has ignored ones, or the loss names another label to
        ignore than torch does by itself.
        """
        if isinstance(count, _Total):
            return True
        if isinstance(count, _CountedElements):
            return isinstance(count.number, Size)
        if any(isinstance(size, Size) for size in self.type_of(count.value).shape):
            return True
        if count.ignored != USUAL_IGNORE_INDEX:
            return True
        names = [self.inputs[leaf].name for leaf in self.leaves(count.value)]
        return any(_has(self.example.get(name), count.ignored) for name in names)

    def may_ever_differ(self, count: _Count) -> bool:
        """Return whether two batches could have different counts; labels that a table is read at are not negative."""
        if not isinstance(count, _Labels):
            return self.may_differ(count)
        return self.may_differ(count) or not self._is_looked_up(count.value)

    def _is_looked_up(self, labels: int) -> bool:
        """Return whether the labels are elements of a tensor that is an index of an embedding."""
        if not all(node.is_view or node.op in _SELECTIONS for node in self.nodes_of(labels)):
            return False
        indices = {
            leaf
            for node in self.nodes
            if node.op == "aten.embedding.default" and isinstance(node.args[1], Ref)
            for leaf in self.leaves(node.args[1].index)
            if all(part.is_view or part.op in _SAME for part in self.nodes_of(node.args[1].index))
        }
        return self.leaves(labels) <= indices


def _has(tensor: Tensor | None, label: int) -> bool:
    """Return whether a tensor has an element of this value; one without values has none."""
    if tensor is None or tensor.is_floating_point() or tensor.is_meta:
        return False
    return not isinstance(tensor, FakeTensor) and bool((tensor == label).any())


def _segment(graph: _Forward, count: _Count, *, is_near_1: bool) -> tuple[Segment, tuple[str, ...]]:
    """Return the segment that computes a count, and the paths of its inputs in the batch."""
    types = graph.joint.types
    value = None if isinstance(count, _CountedElements) else count.value
    leaves = [] if value is None else sorted(graph.leaves(value))
    built = _UnfinishedWeight(inputs=[graph.type_of(leaf) for leaf in leaves])
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    for node in [] if value is None else graph.nodes_of(value):
        for result in node.results:
            numbers[result] = built.values + node.results.index(result)
        built.add(_built(node, types, numbers), len(node.results))
    number = TensorType(dtype=DType.I64, shape=(), stride=())
    match count:
        case _Total():
            output, most = numbers[count.value], graph.most_summed(count.value)
        case _Labels():
            kind = graph.type_of(count.value)
            differs = replace(kind, dtype=DType.BOOL, stride=contiguous_stride(kind.shape))
            labels = Ref(numbers[count.value])
            counted = built.new("aten.ne.Scalar", (labels, count.ignored), differs)
            output, most = built.new("aten.sum.default", (Ref(counted),), number), int(kind.numel)
        case _CountedElements():
            kwargs = (("dtype", DType.I64), ("device", Symbol("device")))
            output = built.new("aten.full.default", ((), count.number), number, kwargs)
            most = int(count.number)
        case _:
            assert_never(count)
    if is_near_1 and most > 1:
        unit = 2.0 ** -math.ceil(math.log2(most))
        weight = replace(number, dtype=DType.F32)
        output = built.new("aten.mul.Tensor", (Ref(output), unit), weight)
    segment = Segment(
        name=_NAME, inputs=tuple(built.inputs), nodes=tuple(built.nodes), outputs=(output,)
    )
    return segment, tuple(graph.inputs[leaf].name for leaf in leaves)


@dataclass(slots=True, kw_only=True)
class _UnfinishedWeight:
    """The inputs and nodes of a segment so far; ``values`` counts their results."""

    inputs: list[TensorType]
    nodes: list[Node] = field(default_factory=list)
    values: int = 0

    def __post_init__(self) -> None:
        self.values = len(self.inputs)

    def add(self, node: Node, results: int = 1) -> None:
        """Append a node."""
        self.nodes.append(node)
        self.values += results

    def new(
        self,
        op: str,
        args: tuple[NodeArg, ...],
        kind: TensorType,
        kwargs: tuple[tuple[str, NodeArg], ...] = (),
    ) -> int:
        """Append a node with one result, and return its number."""
        self.add(Node(op=op, args=args, kwargs=kwargs, results=(kind,)))
        return self.values - 1


def _built(
    node: JointNode, types: tuple[TensorType | None, ...], numbers: Mapping[int, int]
) -> Node:
    def own(arg: NodeArg) -> NodeArg:
        return renumbered(arg, numbers)

    return Node(
        op=node.op,
        args=tuple(map(own, node.args)),
        kwargs=tuple((key, own(arg)) for key, arg in node.kwargs),
        results=tuple(types[result] for result in node.results),
        flops=node.flops,
        workspace_bytes=node.workspace_bytes,
        source=node.source,
    )
