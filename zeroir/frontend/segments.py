"""Cut the joint graph into segments: the forward and the backward of every run.

What a segment takes from another one is bound as a strided view of the value's root, so a view is never stored beside
what it looks into. Views and casts of parameters are rebuilt in each segment that uses them, from the parameter
itself. A gradient that several runs contribute to is cut apart: each run yields its own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroir.errors import InternalError, UserError
from zeroir.frontend.joint import Alias, InputKind, Joint, JointNode
from zeroir.frontend.partition import Run, parameter_of
from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.segment import Node, NodeArg, Ref, Segment, Symbol, TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a segment input is bound to: a parameter by name, or a root value seen from ``offset`` on as ``type``."""

    type: TensorType
    parameter: str | None = None
    root: int = -1
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An output that later segments read: the root value of this number."""

    root: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """An output that contributes to a parameter's gradient."""

    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """An output that is the new value of a module buffer."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The output that is the loss."""


Sink = Stored | Gradient | Mutation | Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCall:
    """A segment with what it reads and where each output goes. ``unit`` and ``count`` say whose call it is."""

    segment: Segment
    unit: str
    count: int
    is_backward: bool
    sources: tuple[Source, ...]
    sinks: tuple[Sink, ...]


@dataclass(slots=True)
class _Piece:
    """A segment in the making: its nodes, and the values it must yield for whom."""

    run: Run
    is_backward: bool
    nodes: list[JointNode]
    sinks: list[tuple[int, Sink]] = field(default_factory=list)


def cut(joint: Joint, runs: Sequence[Run], canonical: Mapping[str, str]) -> tuple[SegmentCall, ...]:
    """The segment calls in execution order: forwards, then backwards. Equal segments are one and the same object."""
    return _Cutter(joint, runs, canonical).cut()


class _Cutter:
    def __init__(self, joint: Joint, runs: Sequence[Run], canonical: Mapping[str, str]) -> None:
        self.joint = joint
        self.types = list(joint.types)
        self.aliases = list(joint.aliases)
        self.canonical = canonical
        self.parameters = {
            item.value: canonical[item.name]
            for item in joint.inputs
            if item.kind is InputKind.PARAMETER
        }
        self.pieces = [
            *(_Piece(run, False, run.forward) for run in runs),
            *(_Piece(run, True, run.backward) for run in reversed(runs)),
        ]
        # Segments by name, so that equal ones are built once.
        self.built: dict[str, list[Segment]] = {}
        self.parents: dict[int, JointNode] = {}
        self.place: dict[int, int] = {}
        for at, piece in enumerate(self.pieces):
            for node in piece.nodes:
                self._register(node, at)

    def cut(self) -> tuple[SegmentCall, ...]:
        self._add_sink(self.joint.loss, Loss())
        for name, value in self.joint.mutations:
            self._add_sink(value, Mutation(buffer=name))
        self._add_gradients()
        found: list[SegmentCall] = []
        # Backwards through time: by then everything that later segments want is known.
        for at in reversed(range(len(self.pieces))):
            call = self._finish(at)
            if call is not None:
                found.append(call)
        return _shared(tuple(reversed(found)))

    def _register(self, node: JointNode, at: int) -> None:
        for result in node.results:
            self.parents[result] = node
            self.place[result] = at

    def _add_sink(self, value: int, sink: Sink) -> None:
        if value not in self.place:
            # An input as it stands: copy it where the backward begins, or in the first forward.
            value = self._copied(value, len(self.pieces) // 2 if isinstance(sink, Gradient) else 0)
        elif isinstance(sink, Gradient | Mutation) and not _is_contiguous(self.defined(value)):
            # Its destination is: a gradient may be expanded from one number, or lie in another order.
            value = self._copied(value, self.place[value])
        self.pieces[self.place[value]].sinks.append((value, sink))

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
        node = JointNode(
            op=op, args=args, kwargs=kwargs, results=(index,), is_backward=self.pieces[at].is_backward,
            is_view=False, is_gradient_sum=False, calls=None, origin=None, source="", flops=0,
        )  # fmt: skip
        self.pieces[at].nodes.append(node)
        self._register(node, at)
        return index

    # ------------------------------------------------------------------------------------------------- gradients

    def _add_gradients(self) -> None:
        uses: dict[int, int] = {}
        for node in self.joint.nodes:
            for ref in node.refs():
                uses[ref] = uses.get(ref, 0) + 1
        for name, value in self.joint.gradients:
            parts: dict[int, list[int]] = {}
            for part in self._parts(value, uses):
                parts.setdefault(self.place.get(part, len(self.pieces) // 2), []).append(part)
            for at in sorted(parts):
                total, *others = parts[at]
                for other in others:
                    total = self._new(
                        at, "aten.add.Tensor", (Ref(total), Ref(other)), self._dense(total)
                    )
                self._add_sink(total, Gradient(parameter=self.canonical[name]))

    def _parts(self, value: int, uses: Mapping[int, int]) -> list[int]:
        """The contributions that a sum of gradients adds, in the order of addition."""
        node = self.parents.get(value)
        if node is None or not node.is_gradient_sum or uses.get(value, 0) > 1:
            return [value]
        places = {self.place.get(ref) for ref in node.refs()}
        nested = [part for ref in node.refs() for part in self._parts(ref, uses)]
        is_local = len(places) == 1 and len(nested) == len(list(node.refs()))
        return [value] if is_local else nested

    # -------------------------------------------------------------------------------------------------- segments

    def _finish(self, at: int) -> SegmentCall | None:
        piece = self.pieces[at]
        if not piece.sinks:
            return None
        builder = _Builder(self, at)
        for node in self._live(at):
            builder.add(node)
        order = {value: i for i, value in enumerate(builder.numbers)}
        sinks = sorted(piece.sinks, key=lambda item: (order[item[0]], _rank(item[1])))
        kind = "backward" if piece.is_backward else "forward"
        segment = builder.build(f"{piece.run.label}.{kind}", [value for value, _ in sinks])
        for source in builder.sources:
            if source.parameter is None and source.root in self.place:
                owner = self.pieces[self.place[source.root]]
                stored = (source.root, Stored(root=source.root))
                if stored not in owner.sinks:
                    owner.sinks.append(stored)
        return SegmentCall(
            segment=segment,
            unit=piece.run.unit,
            count=piece.run.count,
            is_backward=piece.is_backward,
            sources=tuple(builder.sources),
            sinks=tuple(sink for _, sink in sinks),
        )

    def _live(self, at: int) -> list[JointNode]:
        piece = self.pieces[at]
        needed = {value for value, _ in piece.sinks}
        kept: list[JointNode] = []
        for node in reversed(piece.nodes):
            if needed.intersection(node.results):
                kept.append(node)
                needed.update(ref for ref in node.refs() if not self.is_foreign(ref, at))
        return list(reversed(kept))

    def is_foreign(self, value: int, at: int) -> bool:
        """Whether a value comes into a segment from outside: what it looks into is made elsewhere."""
        if parameter_of(value, self.parents, self.parameters) is not None:
            return False
        return self.place.get(self.aliases[value].root) != at

    def source(self, value: int) -> Source:
        """How another segment's value, or an input, comes into a segment."""
        alias, kind = self.aliases[value], self.defined(value)
        root = self.defined(alias.root)
        if not _is_dense(root):
            maker = self.parents.get(alias.root)
            place = maker.source if maker is not None and maker.source else "The model"
            raise UserError(
                f"{place} makes a tensor of shape {list(root.shape)} with strides {list(root.stride)}, between whose "
                "elements there are others, and another unit uses it; call contiguous() on it."
            )
        return Source(type=kind, root=alias.root, offset=alias.offset)

    def defined(self, value: int) -> TensorType:
        kind = self.types[value]
        if kind is None:
            raise InternalError(f"value {value} of the joint graph is undefined but used")
        return kind

    def _dense(self, value: int) -> TensorType:
        kind = self.defined(value)
        return replace(kind, stride=contiguous_stride(kind.shape))


class _Builder:
    """Numbers the values of one segment: inputs in the order of first use, then results."""

    def __init__(self, cutter: _Cutter, at: int) -> None:
        self._cutter = cutter
        self._at = at
        self._nodes: list[JointNode] = []
        self.sources: list[Source] = []
        self._positions: dict[Source, int] = {}
        # The local name of a value: ("input", i), or the joint graph's number of a result computed here.
        self._inputs: dict[int, int] = {}
        self._made: set[int] = set()

    @property
    def numbers(self) -> dict[int, int]:
        """The segment's number of every value of the joint graph that it knows."""
        found = dict(self._inputs)
        index = len(self.sources)
        for node in self._nodes:
            for result in node.results:
                found[result] = index
                index += 1
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def add(self, node: JointNode) -> None:
        for ref in node.refs():
            self._bring(ref)
        self._nodes.append(node)
        self._made.update(node.results)

    def _bring(self, value: int) -> None:
        if value in self._made or value in self._inputs:
            return
        cutter = self._cutter
        name = parameter_of(value, cutter.parents, cutter.parameters)
        if name is not None and value not in cutter.parameters:
            self.add(cutter.parents[value])
            return
        if name is not None:
            source = Source(type=cutter.defined(value), parameter=name)
        elif cutter.is_foreign(value, self._at):
            source = cutter.source(value)
        else:
            raise InternalError(f"value {value} of the joint graph is used before it is made")
        if source not in self._positions:
            self._positions[source] = len(self.sources)
            self.sources.append(source)
        self._inputs[value] = self._positions[source]

    def build(self, name: str, values: Iterable[int]) -> Segment:
        """The segment that yields these values of the joint graph: a known one where there is its like."""
        numbers = self.numbers
        inputs = tuple(source.type for source in self.sources)
        outputs = tuple(numbers[value] for value in values)
        known = self._cutter.built.setdefault(name, [])
        for segment in known:
            if (segment.inputs, segment.outputs) == (inputs, outputs) and self._is_made_by(
                segment.nodes, numbers
            ):
                return segment
        nodes = tuple(
            Node(
                op=node.op,
                args=tuple(_renumbered(arg, numbers) for arg in node.args),
                kwargs=tuple((key, _renumbered(arg, numbers)) for key, arg in node.kwargs),
                results=tuple(self._cutter.types[result] for result in node.results),
                flops=node.flops,
                source=node.source,
            )
            for node in self._nodes
        )
        segment = Segment(
            name=name,
            inputs=inputs,
            nodes=nodes,
            outputs=outputs,
        )
        known.append(segment)
        return known[-1]

    def _is_made_by(self, nodes: Sequence[Node], numbers: Mapping[int, int]) -> bool:
        """Whether a segment's nodes are those collected here."""
        types = self._cutter.types
        return len(nodes) == len(self._nodes) and all(
            known.op == node.op
            and known.flops == node.flops
            and known.source == node.source
            and known.results == tuple(types[result] for result in node.results)
            and _is_renumbered(node.args, known.args, numbers)
            and _is_renumbered(node.kwargs, known.kwargs, numbers)
            for known, node in zip(nodes, self._nodes, strict=True)
        )


def _renumbered(arg: NodeArg, numbers: Mapping[int, int]) -> NodeArg:
    if isinstance(arg, Ref):
        return Ref(numbers[arg.index])
    if isinstance(arg, tuple):
        return tuple(_renumbered(item, numbers) for item in arg)
    return arg


def _is_renumbered(arg: object, known: object, numbers: Mapping[int, int]) -> bool:
    """Whether an argument, with the segment's numbers, is this one: of the same type, down to the sign of a zero."""
    if type(arg) is not type(known):
        return False
    if isinstance(arg, Ref):
        assert isinstance(known, Ref)
        return numbers[arg.index] == known.index
    if isinstance(arg, tuple):
        assert isinstance(known, tuple)
        return len(arg) == len(known) and all(
            _is_renumbered(a, b, numbers) for a, b in zip(arg, known, strict=True)
        )
    if isinstance(arg, float):
        return repr(arg) == repr(known)
    return arg == known


def _rank(sink: Sink) -> tuple[int, str]:
    match sink:
        case Loss():
            return 0, ""
        case Stored():
            return 1, ""
        case Mutation(buffer=name):
            return 2, name
        case Gradient(parameter=name):
            return 3, name


def _is_contiguous(kind: TensorType) -> bool:
    dense = contiguous_stride(kind.shape)
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(kind.shape, kind.stride, dense, strict=True)
    )


def _is_dense(kind: TensorType) -> bool:
    """Whether every element of a type's storage is one element of the tensor."""
    if not kind.numel:
        return True
    expected = 1
    for step, size in sorted(zip(kind.stride, kind.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _shared(calls: tuple[SegmentCall, ...]) -> tuple[SegmentCall, ...]:
    """One segment for all equal ones; different ones of one name are numbered."""
    by_digest: dict[str, Segment] = {}
    digests: dict[int, str] = {}
    counts: dict[str, int] = {}
    found: list[SegmentCall] = []
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
        found.append(replace(call, segment=by_digest[digest]))
    return tuple(found)
