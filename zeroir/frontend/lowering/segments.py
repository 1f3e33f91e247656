"""Cuts the joint graph into segments: the forward and the backward of every call of a unit.

A value from another segment is passed as a strided view of its root, so a view is never stored in addition to its root.
Views and casts of parameters are recomputed from the parameter in each segment that uses them. A gradient to which
several unit calls contribute is split: each call returns its own contribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroir.errors import InternalError, UserError
from zeroir.frontend.capture.captured_graph import Alias, CapturedGraph, GraphNode, InputKind
from zeroir.frontend.lowering.exchanges import is_exchange
from zeroir.frontend.lowering.partition import parameter_of
from zeroir.frontend.lowering.segment_calls import (
    BufferSink,
    GradientSink,
    LossSink,
    OutputSink,
    SegmentCall,
    SegmentSource,
    Sink,
    StoredSink,
)
from zeroir.frontend.lowering.unit_call import UnitCall
from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType


@dataclass(slots=True)
class _UnfinishedSegment:
    """The nodes of a segment, and its outputs as far as they are known, each with its sink."""

    unit_call: UnitCall
    is_backward: bool
    nodes: list[GraphNode]
    sinks: list[tuple[int, Sink]] = field(default_factory=list)

    @property
    def is_exchange(self) -> bool:
        """Whether the nodes are collectives, which are apart from all others."""
        return bool(self.nodes) and is_exchange(self.nodes[0])


def cut(
    joint: CapturedGraph,
    unit_calls: Sequence[UnitCall],
    canonical: Mapping[str, str],
    *,
    forward: str = "forward",
    existing: Iterable[Segment] = (),
) -> tuple[SegmentCall, ...]:
    """Return the segment calls in execution order: forwards, then backwards. Equal segments are one object.

    ``canonical`` maps every name of a parameter to its first. ``forward`` is the suffix of the names of segments before
    the loss. A segment that is equal to one of ``existing``, which have other names, is replaced by that one.
    """
    return _shared(_Cutter(joint, unit_calls, canonical, forward).cut(), existing)


class _Cutter:
    def __init__(
        self,
        joint: CapturedGraph,
        unit_calls: Sequence[UnitCall],
        canonical: Mapping[str, str],
        forward: str,
    ) -> None:
        self.joint = joint
        self.forward = forward
        self.types = list(joint.types)
        self.aliases = list(joint.aliases)
        self.canonical = canonical
        self.parameters = {
            item.value: canonical[item.name]
            for item in joint.inputs
            if item.kind is InputKind.PARAMETER
        }
        self.segments = [
            *(_UnfinishedSegment(call, False, call.forward) for call in unit_calls),
            *(_UnfinishedSegment(call, True, call.backward) for call in reversed(unit_calls)),
        ]
        # Segments by the text of their name and contents, so that equal ones are built once.
        self.built: dict[str, Segment] = {}
        self.parents: dict[int, GraphNode] = {}
        self.segment_of: dict[int, int] = {}
        for at, segment in enumerate(self.segments):
            for node in segment.nodes:
                self._register(node, at)

    def cut(self) -> tuple[SegmentCall, ...]:
        self._copy_operands()
        self._add_sink(self.joint.loss, LossSink())
        for name, value in self.joint.mutations:
            self._add_sink(value, BufferSink(buffer=name))
        for output, value in self.joint.outputs:
            own = value if output.stored is None else self._copied_early(value)
            self._add_sink(own, OutputSink(name=output))
        self._add_gradients()
        calls: list[SegmentCall] = []
        # In reverse order, so that the outputs that later segments read are known.
        for at in reversed(range(len(self.segments))):
            call = self._finish(at)
            if call is not None:
                calls.append(call)
        return tuple(reversed(calls))

    def _register(self, node: GraphNode, at: int) -> None:
        for result in node.results:
            self.parents[result] = node
            self.segment_of[result] = at

    def _place_beside(self, value: int, default: int) -> int:
        """Return the segment that may compute with a value: its own, or the one after an exchange."""
        at = self.segment_of.get(value, default)
        return at + 1 if self.segments[at].is_exchange else at

    def _copy_operands(self) -> None:
        """Let ranks exchange whole contiguous values that segments compute."""
        for at, segment in enumerate(self.segments):
            if not segment.is_exchange:
                continue
            for number, node in enumerate(segment.nodes):
                source = node.args[0]
                assert isinstance(source, Ref)
                value = source.index
                is_root = self.aliases[value].root == value and value in self.segment_of
                if not (is_root and self.defined(value).is_contiguous):
                    copy = Ref(self._copied(value, at - 1))
                    segment.nodes[number] = replace(node, args=(copy, *node.args[1:]))

    def _add_sink(self, value: int, sink: Sink) -> None:
        if value not in self.segment_of:
            # The value is an input: copy it where the backward starts, or in the first forward.
            value = self._copied(
                value, len(self.segments) // 2 if isinstance(sink, GradientSink) else 0
            )
        elif self.segments[self.segment_of[value]].is_exchange:
            value = self._copied(value, self._place_beside(value, 0))
        elif (
            isinstance(sink, GradientSink | BufferSink | OutputSink)
            and not self.defined(value).is_contiguous
        ):
            # Its destination is contiguous; a gradient may be an expanded number, or have another order of dimensions.
            value = self._copied(value, self.segment_of[value])
        self.segments[self.segment_of[value]].sinks.append((value, sink))

    def _copied_early(self, value: int) -> int:
        """Return a copy that is made where the copied value is, which need not be kept until the end of the forward."""
        parent = self.parents.get(value)
        copied = (
            None if parent is None or parent.op != "aten.clone.default" else next(parent.refs())
        )
        if copied is None or copied not in self.segment_of:
            return value
        return self._copied(copied, self._place_beside(copied, 0))

    def _copied(self, value: int, at: int) -> int:
        layout = (("memory_format", Symbol("contiguous_format")),)
        return self._new(at, "aten.clone.default", (Ref(value),), self._dense(value), layout)

    def _new(
        self,
        at: int,
        op: str,
        args: tuple[NodeArg, ...],
        kind: TensorType,
        kwargs: tuple[tuple[str, NodeArg], ...] = (),
    ) -> int:
        index = len(self.types)
        self.types.append(kind)
        self.aliases.append(Alias(root=index, offset=0))
        node = GraphNode(
            op=op, args=args, kwargs=kwargs, results=(index,), is_backward=self.segments[at].is_backward,
            is_view=False, is_gradient_sum=False, calls=None, origin=None, source="", flops=0,
            workspace_bytes=None,
        )  # fmt: skip
        self.segments[at].nodes.append(node)
        self._register(node, at)
        return index

    # ------------------------------------------------------------------------------------------------- gradients

    def _add_gradients(self) -> None:
        uses: dict[int, int] = {}
        for node in self.joint.nodes:
            for ref in node.refs():
                uses[ref] = uses.get(ref, 0) + 1
        for name, value in self.joint.gradients:
            contributions: dict[int, list[int]] = {}
            for term in self._contributions(value, uses):
                at = self._place_beside(term, len(self.segments) // 2)
                contributions.setdefault(at, []).append(term)
            for at in sorted(contributions):
                total, *terms = contributions[at]
                for term in terms:
                    total = self._new(
                        at, "aten.add.Tensor", (Ref(total), Ref(term)), self._dense(total)
                    )
                self._add_sink(total, GradientSink(parameter=self.canonical[name]))

    def _contributions(self, value: int, uses: Mapping[int, int]) -> list[int]:
        """Return the terms of a sum of gradients, in the order of addition; a sum within one segment is one term."""
        node = self.parents.get(value)
        if node is None or not node.is_gradient_sum or uses.get(value, 0) > 1:
            return [value]
        segments = {self.segment_of.get(ref) for ref in node.refs()}
        nested = [term for ref in node.refs() for term in self._contributions(ref, uses)]
        is_local = len(segments) == 1 and len(nested) == len(list(node.refs()))
        return [value] if is_local else nested

    # -------------------------------------------------------------------------------------------------- segments

    def _finish(self, at: int) -> SegmentCall | None:
        unfinished = self.segments[at]
        if not unfinished.sinks:
            return None
        builder = _SegmentBuilder(self, at)
        for node in self._live(at):
            builder.add(node)
        order = {value: i for i, value in enumerate(builder.numbers)}
        sinks = sorted(unfinished.sinks, key=lambda item: (order[item[0]], _rank(item[1])))
        kind = "backward" if unfinished.is_backward else self.forward
        segment = builder.build(
            f"{unfinished.unit_call.label}.{kind}", [value for value, _ in sinks]
        )
        for source in builder.sources:
            if source.parameter is None and source.root in self.segment_of:
                owner = self.segments[self.segment_of[source.root]]
                stored = (source.root, StoredSink(root=source.root))
                if stored not in owner.sinks:
                    owner.sinks.append(stored)
        return SegmentCall(
            segment=segment,
            unit=unfinished.unit_call.unit,
            call_index=unfinished.unit_call.index,
            is_backward=unfinished.is_backward,
            sources=tuple(builder.sources),
            sinks=tuple(sink for _, sink in sinks),
            is_exchange=unfinished.is_exchange,
        )

    def _live(self, at: int) -> list[GraphNode]:
        """Return the nodes on which the segment's outputs depend, in execution order."""
        segment = self.segments[at]
        needed = {value for value, _ in segment.sinks}
        live: list[GraphNode] = []
        for node in reversed(segment.nodes):
            if needed.intersection(node.results):
                live.append(node)
                needed.update(ref for ref in node.refs() if not self.is_foreign(ref, at))
        return list(reversed(live))

    def is_foreign(self, value: int, at: int) -> bool:
        """Return whether a segment takes a value from outside, because the value's root is computed elsewhere."""
        if parameter_of(value, self.parents, self.parameters) is not None:
            return False
        return self.segment_of.get(self.aliases[value].root) != at

    def source(self, value: int) -> SegmentSource:
        """Return the source of a value that is an input or is computed in another segment."""
        alias, kind = self.aliases[value], self.defined(value)
        root = self.defined(alias.root)
        if not root.is_dense:
            maker = self.parents.get(alias.root)
            line = maker.source if maker is not None and maker.source else self.joint.place
            raise UserError(
                f"{line} makes a tensor of shape {list(root.shape)} with strides {list(root.stride)}, which leave gaps "
                "between its elements, and another unit uses it; call contiguous() on it."
            )
        return SegmentSource(type=kind, root=alias.root, offset=alias.offset)

    def defined(self, value: int) -> TensorType:
        kind = self.types[value]
        if kind is None:
            raise InternalError(f"value {value} of the joint graph is undefined but used")
        return kind

    def _dense(self, value: int) -> TensorType:
        kind = self.defined(value)
        return replace(kind, stride=contiguous_stride(kind.shape))


class _SegmentBuilder:
    """Numbers the values of one segment: inputs in the order of first use, then results."""

    def __init__(self, cutter: _Cutter, at: int) -> None:
        self._cutter = cutter
        self._at = at
        self._nodes: list[GraphNode] = []
        self.sources: list[SegmentSource] = []
        self._positions: dict[SegmentSource, int] = {}
        # The position of each value of the joint graph that the segment takes, and the values that it computes.
        self._inputs: dict[int, int] = {}
        self._computed: set[int] = set()

    @property
    def numbers(self) -> dict[int, int]:
        """The segment's numbers of the joint graph's values that it takes or computes."""
        numbers = dict(self._inputs)
        index = len(self.sources)
        for node in self._nodes:
            for result in node.results:
                numbers[result] = index
                index += 1
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def add(self, node: GraphNode) -> None:
        """Append a node, after the casts and views of parameters that it reads."""
        for ref in node.refs():
            self._require(ref)
        self._nodes.append(node)
        self._computed.update(node.results)

    def _require(self, value: int) -> None:
        if value in self._computed or value in self._inputs:
            return
        cutter = self._cutter
        name = parameter_of(value, cutter.parents, cutter.parameters)
        if name is not None and value not in cutter.parameters:
            self.add(cutter.parents[value])
            return
        if name is not None:
            source = SegmentSource(type=cutter.defined(value), parameter=name)
        elif cutter.is_foreign(value, self._at):
            source = cutter.source(value)
        else:
            raise InternalError(f"value {value} of the joint graph is used before it is computed")
        if source not in self._positions:
            self._positions[source] = len(self.sources)
            self.sources.append(source)
        self._inputs[value] = self._positions[source]

    def build(self, name: str, values: Iterable[int]) -> Segment:
        """Return the segment that returns these values of the joint graph: an earlier one where it is equal."""
        numbers = self.numbers
        inputs = tuple(source.type for source in self.sources)
        outputs = tuple(numbers[value] for value in values)
        nodes = tuple(
            Node(
                op=node.op,
                args=tuple(renumbered(arg, numbers) for arg in node.args),
                kwargs=tuple((key, renumbered(arg, numbers)) for key, arg in node.kwargs),
                results=tuple(self._cutter.types[result] for result in node.results),
                flops=node.flops,
                workspace_bytes=node.workspace_bytes,
                source=node.source,
            )
            for node in self._nodes
        )
        # As text, because 1 is equal to 1.0 and True, and 0.0 to -0.0.
        key = repr((name, inputs, nodes, outputs))
        if key not in self._cutter.built:
            self._cutter.built[key] = Segment(
                name=name, inputs=inputs, nodes=nodes, outputs=outputs
            )
        return self._cutter.built[key]


def renumbered(arg: NodeArg, numbers: Mapping[int, int]) -> NodeArg:
    """Return the argument of a node with other numbers of values."""
    if isinstance(arg, Ref):
        return Ref(numbers[arg.index])
    if isinstance(arg, tuple):
        return tuple(renumbered(item, numbers) for item in arg)
    return arg


def _rank(sink: Sink) -> tuple[int, str]:
    match sink:
        case LossSink():
            return 0, ""
        case StoredSink():
            return 1, ""
        case BufferSink(buffer=name):
            return 2, name
        case GradientSink(parameter=name):
            return 3, name
        case OutputSink(name=output):
            return 4, f"{output.stored or ''} {output.path}"


def _shared(calls: tuple[SegmentCall, ...], existing: Iterable[Segment]) -> tuple[SegmentCall, ...]:
    """Return the calls with one object for all equal segments; different segments of one name get numbers."""
    by_digest = {segment.digest(): segment for segment in existing}
    digests: dict[int, str] = {}
    counts: dict[str, int] = {}
    shared: list[SegmentCall] = []
    for call in calls:
        if id(call.segment) not in digests:
            digests[id(call.segment)] = call.segment.digest()
        digest = digests[id(call.segment)]
        if digest not in by_digest:
            name = call.segment.name
            index = counts.get(name, 0)
            counts[name] = index + 1
            by_digest[digest] = (
                replace(call.segment, name=f"{name}.{index}") if index else call.segment
            )
        shared.append(replace(call, segment=by_digest[digest]))
    return tuple(shared)
