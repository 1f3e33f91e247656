"""What a loss is the mean over: labels that it does not ignore, all elements of a tensor, or a sum over the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroir.frontend.capture.captured_graph import CapturedGraph, GraphNode, InputKind
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import NodeArg, Ref, TensorType
from zeroir.ir.segments.size_numbers import SizeNumber
from zeroir.ir.sizes import Size

USUAL_IGNORE_INDEX: Final = -100
"""The label that torch's losses ignore unless told otherwise."""

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

_TOTALS: Final = frozenset(
    {"aten.sum.default", "aten.sum.dim_IntList", "aten.count_nonzero.default"}
)
_MEANS: Final[Mapping[str, int | None]] = {
    "aten.mean.default": None,
    "aten.mean.dim": None,
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
_ADDITIONS: Final = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
_LEAST: Final = frozenset({"aten.clamp.default", "aten.clamp_min.default"})
_MOST_ADDED: Final = 1e-3
"""What may be added to a divisor lest it is 0."""

_SELECTIONS: Final = _SAME | {
    *("aten.constant_pad_nd.default", "aten.roll.default", "aten.flip.default"),
}
_POSITIONS: Final = frozenset({"aten.argmax.default", "aten.argmin.default"})
"""Operators whose results are never negative."""


@dataclass(frozen=True, slots=True)
class CountedLabels:
    """The number of a value's elements other than one label."""

    value: int
    ignored: int


@dataclass(frozen=True, slots=True)
class Total:
    """A value without dimensions, a sum over the batch."""

    value: int


@dataclass(frozen=True, slots=True)
class CountedElements:
    """A number that depends on the sizes of the batch alone."""

    number: int


Count = CountedLabels | Total | CountedElements


class LossGraph:
    """The nodes before the loss, and what their values are made of."""

    def __init__(self, joint: CapturedGraph, example: Mapping[str, Tensor]) -> None:
        self.joint = joint
        self.inputs = {item.value: item for item in joint.inputs}
        self._example = example
        self._nodes = [node for node in joint.nodes if not node.is_backward]
        self._makers = {result: node for node in self._nodes for result in node.results}
        self._kinds = {item.value: frozenset({item.kind}) for item in joint.inputs}
        """The kinds of inputs that each value is computed from."""
        self._sized: set[int] = set()
        """The values that are computed from sizes that differ from batch to batch."""
        for node in self._nodes:
            refs = set(node.refs())
            kinds = frozenset[InputKind]().union(*(self._kinds[ref] for ref in refs))
            self._kinds.update(dict.fromkeys(node.results, kinds))
            if _has_size(node.args) or not refs.isdisjoint(self._sized):
                self._sized.update(node.results)

    def counts(self, value: int) -> Iterator[Count | None]:
        """Yield for each term of a linear combination what it is the mean over; None where it is no mean.

        A term that does not depend on the batch yields nothing.
        """
        node = self._makers.get(value)
        if not self._depends_on_batch(value):
            return
        if node is None:
            yield None
        elif terms := self._terms(node):
            for term in terms:
                yield from self.counts(term)
        elif node.op in _LOSSES:
            # Where classes have weights, the loss is divided by theirs.
            yield self._labels_of(node) if node.args[2] is None else None
        elif node.op == "aten.div.Tensor":
            yield self._quotient(*node.args)
        elif self._reduction(node) == _MEAN:
            averaged = next(node.refs())
            yield None if self._has_reductions(averaged) else self._elements_of(averaged)
        else:
            yield None

    def has_uneven_means(self) -> bool:
        """Return whether the loss has a mean over elements of which batches of one shape may have different numbers."""
        for node in self._nodes:
            if node.op in _LOSSES and node.args[2] is not None and node.args[3] == _MEAN:
                return True
            labels = self._labels_of(node)
            if labels is not None and self.may_differ(labels):
                return True
        return any(map(self._is_divided_by_batch, self.nodes_of(self.joint.loss)))

    def may_differ(self, count: Count) -> bool:
        """Return whether two batches are expected to have different counts.

        Labels of one size are taken to be ignored if the example has ignored ones, the model computes them, or the loss
        names another label to ignore than torch does by itself.
        """
        if isinstance(count, Total):
            return True
        if isinstance(count, CountedElements):
            return isinstance(count.number, Size)
        if any(isinstance(size, Size) for size in self.type_of(count.value).shape):
            return True
        if count.ignored != USUAL_IGNORE_INDEX or not self._is_selected(count.value):
            return True
        names = [self.inputs[leaf].name for leaf in self.leaves(count.value)]
        return any(_has(self._example.get(name), count.ignored) for name in names)

    def may_ever_differ(self, count: Count) -> bool:
        """Return whether two batches could have different counts; labels that a table is read at are not negative."""
        if not isinstance(count, CountedLabels):
            return self.may_differ(count)
        return self.may_differ(count) or not self._is_looked_up(count.value)

    def is_of_batch(self, value: int) -> bool:
        """Return whether a value is computed from the batch alone."""
        return self._kinds[value] == {InputKind.BATCH}

    def leaves(self, value: int) -> set[int]:
        """Return the inputs that a value is computed from."""
        used = {ref for node in self.nodes_of(value) for ref in node.refs()} | {value}
        return {ref for ref in used if ref not in self._makers}

    def nodes_of(self, value: int) -> list[GraphNode]:
        """Return the nodes that compute a value, in execution order."""
        needed, nodes = {value}, list[GraphNode]()
        for node in reversed(self._nodes):
            if needed.intersection(node.results):
                nodes.append(node)
                needed.update(node.refs())
        return nodes[::-1]

    def type_of(self, value: int) -> TensorType:
        """Return the type of a value."""
        kind = self.joint.types[value]
        assert kind is not None
        return kind

    def most_summed(self, total: int) -> int:
        """Return the number of elements of which a value is the sum, at the most."""
        return int(self._numel(next(self._makers[total].refs())))

    # --------------------------------------------------------------------------------------------- sums and means

    def _terms(self, node: GraphNode) -> list[int]:
        """Return the values that a node adds up, with factors that no batch changes; none if it does something else."""
        operands = [arg.index for arg in node.args if isinstance(arg, Ref)]
        if node.is_view or node.op in _SAME:
            return operands
        if _has_size((*node.args, *dict(node.kwargs).values())):
            return []
        if node.op in _ADDITIONS:
            return operands
        scaled = [operand for operand in operands if self._depends_on_batch(operand)]
        is_divisor = node.op == "aten.div.Tensor" and scaled != operands[:1]
        return scaled if node.op in _SCALINGS and len(scaled) == 1 and not is_divisor else []

    def _reduction(self, node: GraphNode) -> NodeArg:
        """Return which number a node makes of all elements of its first argument; None if it does something else."""
        if node.op in _LOSSES:
            return node.args[3]
        if self.type_of(node.results[0]).shape != ():
            return None
        if node.op in _TOTALS:
            return _SUM
        if node.op not in _MEANS:
            return None
        at = _MEANS[node.op]
        # Torch leaves out trailing arguments with their default, which is the mean.
        return _MEAN if at is None or len(node.args) <= at else node.args[at]

    def _has_reductions(self, value: int) -> bool:
        """Return whether a value is computed from sums or means over the batch, which may have counts of their own."""
        return any(
            self._reduction(node) in (_MEAN, _SUM) and self._depends_on_batch(node.results[0])
            for node in self.nodes_of(value)
        )

    def _quotient(self, dividend: NodeArg, divisor: NodeArg) -> Count | None:
        """Return what a quotient is the mean over, where sums are divided by a sum over the batch, or by a size."""
        if not isinstance(dividend, Ref) or not self._is_sum(dividend.index):
            return None
        if isinstance(divisor, Size):
            return CountedElements(divisor)
        total = self._total(divisor)
        return None if total is None else self._labels_in(total) or Total(total.results[0])

    def _is_sum(self, value: int) -> bool:
        """Return whether a value adds up sums over the batch, with constant factors."""
        node = self._makers.get(value)
        if node is None or not self._depends_on_batch(value):
            return False
        if terms := self._terms(node):
            return all(map(self._is_sum, terms))
        if self._reduction(node) != _SUM:
            return False
        return node.op in _LOSSES or not self._has_reductions(next(node.refs()))

    def _total(self, divisor: NodeArg) -> GraphNode | None:
        """Return the sum that a divisor is, apart from what keeps it from 0: at least 1, or a little more."""
        while isinstance(divisor, Ref):
            node = self._makers.get(self._source(divisor.index))
            if node is None or node.op in _TOTALS:
                return node if node is not None and self._reduction(node) == _SUM else None
            divisor, *others = node.args
            (kept,) = others if len(others) == 1 else (None,)
            most = 1 if node.op in _LEAST else _MOST_ADDED if node.op == "aten.add.Tensor" else 0
            if not isinstance(kept, int | float) or _has_size(kept) or not 0 < kept <= most:
                return None
        return None

    def _is_divided_by_batch(self, node: GraphNode) -> bool:
        """Return whether a node divides by one number that the data decide, or by a number of elements."""
        if node.op not in ("aten.div.Tensor", "aten.reciprocal.default"):
            return False
        *dividends, divisor = node.args
        if not isinstance(divisor, Ref) or self.type_of(divisor.index).shape != ():
            return False
        kinds, total = self._kinds[divisor.index], self._total(divisor)
        if InputKind.BATCH not in kinds:
            return False
        if total is not None and not self._type_summed(total).dtype.is_floating:
            return True
        # Data that are divided by their largest element are not.
        is_data = all(isinstance(arg, Ref) and self.is_of_batch(arg.index) for arg in dividends)
        is_scaled = bool(dividends) and is_data and total is None
        return kinds <= {InputKind.BATCH, InputKind.CONSTANT} and not is_scaled

    def _type_summed(self, total: GraphNode) -> TensorType:
        return self.type_of(self._source(next(total.refs())))

    # --------------------------------------------------------------------------------------------- labels

    def _labels_of(self, node: GraphNode) -> Count | None:
        """Return the labels of which a node computes the mean loss; None if it computes something else."""
        if node.op not in _LOSSES:
            return None
        _, labels, _, reduction, ignored = node.args
        assert isinstance(labels, Ref)
        assert isinstance(ignored, int)
        if reduction != _MEAN:
            return None
        value = self._source(labels.index)
        if self._kinds[value] <= {InputKind.CONSTANT}:
            return self._elements_of(value)
        return CountedLabels(value, ignored)

    def _labels_in(self, total: GraphNode) -> CountedLabels | None:
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
        return CountedLabels(self._source(labels.index), ignored)

    def _is_selected(self, labels: int) -> bool:
        """Return whether the labels are elements of the batch as it is, or positions in a tensor."""
        maker = self._makers.get(labels)
        if maker is not None and maker.op in _POSITIONS:
            return True
        return all(node.is_view or node.op in _SELECTIONS for node in self.nodes_of(labels))

    def _is_looked_up(self, labels: int) -> bool:
        """Return whether the labels are elements of a tensor that is an index of an embedding."""
        indices = {
            leaf
            for node in self._nodes
            if node.op == "aten.embedding.default" and isinstance(node.args[1], Ref)
            for leaf in self.leaves(node.args[1].index)
            if all(part.is_view or part.op in _SAME for part in self.nodes_of(node.args[1].index))
        }
        return self.leaves(labels) <= indices

    # --------------------------------------------------------------------------------------------- values

    def _operand(self, node: GraphNode) -> GraphNode | None:
        (first, *_) = node.args
        return self._makers.get(self._source(first.index)) if isinstance(first, Ref) else None

    def _source(self, value: int) -> int:
        """Return the value before copies, casts that keep integers, and views with as many elements."""
        node = self._makers.get(value)
        while node is not None and (node.is_view or node.op in _SAME):
            (first, *_) = node.args
            if not isinstance(first, Ref) or self._numel(first.index) != self._numel(value):
                break
            if not _keeps_integers(self.type_of(first.index).dtype, self.type_of(value).dtype):
                break
            value = first.index
            node = self._makers.get(value)
        return value

    def _elements_of(self, value: int) -> CountedElements:
        return CountedElements(self._numel(value))

    def _numel(self, value: int) -> int:
        return self.type_of(value).numel

    def _depends_on_batch(self, value: int) -> bool:
        return InputKind.BATCH in self._kinds[value] or value in self._sized


def _keeps_integers(source: DType, destination: DType) -> bool:
    """Return whether a cast keeps all integers that it is given, apart from rounding to a float."""
    if destination.is_floating:
        return True
    if source.is_floating or destination is DType.BOOL:
        return source is destination
    return destination.itemsize_bytes >= source.itemsize_bytes


def _has_size(arg: NodeArg) -> bool:
    """Return whether the arguments of a node have sizes that depend on dims."""
    return isinstance(arg, Size | SizeNumber) or (
        isinstance(arg, tuple) and any(map(_has_size, arg))
    )


def _has(tensor: Tensor | None, label: int) -> bool:
    """Return whether a tensor has an element of this value; one without values has none."""
    if tensor is None or tensor.is_floating_point() or tensor.is_meta:
        return False
    return not isinstance(tensor, FakeTensor) and bool((tensor == label).any())
