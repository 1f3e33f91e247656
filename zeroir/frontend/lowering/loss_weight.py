"""The weight of a batch that follows from its loss: the number of elements that the loss is the mean over.

These are the labels of torch's ``cross_entropy`` or ``nll_loss`` without the ignored ones, all elements of another
mean, or the sum over the batch, such as that of a mask, that another sum is divided by. With that number as its weight,
batches count in the mean over a job as if one process computed the loss of all of them. It must follow from the batch
alone. Constant factors of the loss change nothing, and neither does label smoothing, whose terms are means over the
same labels, nor a term that does not depend on the batch, such as a norm of weights.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from torch import Tensor

from zeroir.frontend.capture.captured_graph import CapturedGraph, GraphNode
from zeroir.frontend.lowering.loss_counts import (
    Count,
    CountedElements,
    CountedLabels,
    LossGraph,
    Total,
)
from zeroir.frontend.lowering.segments import renumbered
from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType

_NAME: Final = "weight"


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
    joint: CapturedGraph, example: Mapping[str, Tensor], *, is_near_1: bool = False
) -> LossWeight | None:
    """Return the weight of a batch that follows from the loss; None where the loss is not one such mean.

    ``example`` are the tensors of the example batch, by path.

    With ``is_near_1`` elements are counted in a unit, a power of 2, such that no weight is above 1: weights multiply
    gradients, and those of FP16 have few exponents.
    """
    graph = LossGraph(joint, example)
    counts = set(graph.counts(joint.loss))
    if len(counts) != 1:
        return None
    (count,) = counts
    if count is None or not (isinstance(count, CountedElements) or graph.is_of_batch(count.value)):
        return None
    segment, paths = _segment(graph, count, is_near_1=is_near_1)
    return LossWeight(
        segment=segment,
        paths=paths,
        may_differ=graph.may_differ(count),
        may_ever_differ=graph.may_ever_differ(count),
    )


def may_count_differently(joint: CapturedGraph, example: Mapping[str, Tensor]) -> bool:
    """Return whether the loss has a mean over elements of which batches of one shape may have different numbers."""
    return LossGraph(joint, example).has_uneven_means()


def _segment(graph: LossGraph, count: Count, *, is_near_1: bool) -> tuple[Segment, tuple[str, ...]]:
    """Return the segment that computes a count, and the paths of its inputs in the batch."""
    types = graph.joint.types
    value = None if isinstance(count, CountedElements) else count.value
    leaves = [] if value is None else sorted(graph.leaves(value))
    built = _UnfinishedWeight(inputs=[graph.type_of(leaf) for leaf in leaves])
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    for node in [] if value is None else graph.nodes_of(value):
        for result in node.results:
            numbers[result] = built.values + node.results.index(result)
        built.add(_built(node, types, numbers), len(node.results))
    number = TensorType(dtype=DType.I64, shape=(), stride=())
    match count:
        case Total():
            output, most = numbers[count.value], graph.most_summed(count.value)
        case CountedLabels():
            kind = graph.type_of(count.value)
            differs = replace(kind, dtype=DType.BOOL, stride=contiguous_stride(kind.shape))
            labels = Ref(numbers[count.value])
            counted = built.new("aten.ne.Scalar", (labels, count.ignored), differs)
            output, most = built.new("aten.sum.default", (Ref(counted),), number), int(kind.numel)
        case CountedElements():
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
    node: GraphNode, types: tuple[TensorType | None, ...], numbers: Mapping[int, int]
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
