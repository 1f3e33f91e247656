"""Read torch's joint graph into plain data, checking on the way that a program can hold it.

Ops that change nothing (``detach``, a copy of equal type, a view that undoes another) are left out, as is what no
output needs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

from zeroir.errors import InternalError, UserError
from zeroir.frontend._torch_private import (
    JointGraph,
    Placeholder,
    is_backward,
    is_gradient_sum,
    note_of,
)
from zeroir.frontend.flops import flops
from zeroir.frontend.joint import Alias, InputKind, Joint, JointInput, JointNode
from zeroir.frontend.relative import is_beyond
from zeroir.frontend.replay import Instance
from zeroir.frontend.template import Template
from zeroir.frontend.tracking import Note
from zeroir.ir.allowlist import refusal
from zeroir.ir.segment import NodeArg, Ref, Symbol, TensorType
from zeroir.torch_ops.types import IR_DTYPE

aten = torch.ops.aten

_NO_NOTE = Note(calls=(), origin=0, source="")

_COPIES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten._to_copy.default,
    }
)


def read_graph(
    graph: JointGraph, batch: Sequence[str], prefix: str, instances: Sequence[Instance] = ()
) -> Joint:
    """The joint graph as plain data. ``batch`` are the paths of the batch's tensors; the seeds come after them.

    ``prefix`` is stripped from the names of parameters and buffers. Nodes that stand for a whole block are replaced
    by what their ``instances`` say.

    Raises:
        UserError: where the model uses an operator or element type that programs do not have.
    """
    reader = _Reader(instances)
    for placeholder in graph.placeholders:
        reader.add_input(placeholder, batch, prefix)
    for node in graph.module.graph.nodes:
        if node.op == "get_attr":
            reader.add_constant(node, graph.module)
        elif node.target is torch.ops.zeroir.block.default:
            reader.add_constants_of(node)
    for node in graph.module.graph.nodes:
        if node.target is torch.ops.zeroir.block.default:
            reader.add_block(node)
        elif node.target is torch.ops.zeroir.block_backward.default:
            reader.add_block_backward(node)
        elif node.op == "call_function":
            reader.add_node(node)
    joint = Joint(
        inputs=tuple(reader.inputs),
        nodes=tuple(reader.nodes),
        types=tuple(reader.types),
        aliases=tuple(reader.aliases),
        loss=reader.value(graph.loss),
        gradients=tuple(
            (name.removeprefix(prefix), reader.value(node)) for name, node in graph.gradients
        ),
        mutations=tuple(
            (name.removeprefix(prefix), reader.value(node)) for name, node in graph.mutations
        ),
    )
    return _without_dead_nodes(joint)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is to be known of a node, wherever it stands; ``offsets`` are from what it is a view of."""

    op: torch._ops.OpOverload
    kinds: tuple[TensorType | None, ...]
    offsets: tuple[int, ...]
    is_view: bool
    is_backward: bool
    is_gradient_sum: bool
    flops: int


@dataclass
class _Reader:
    instances: Sequence[Instance]
    inputs: list[JointInput] = field(default_factory=list)
    nodes: list[JointNode] = field(default_factory=list)
    types: list[TensorType | None] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    # Of every fx node the numbers of its results, and whether it has just the one.
    values: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[tuple[bytes, TensorType], int] = field(default_factory=dict)
    # Of every view the value that it was made from.
    parents: dict[int, int] = field(default_factory=dict)
    # The values that only a backward makes.
    late: set[int] = field(default_factory=set)
    # Templates are read many times.
    known: dict[fx.Node, _Facts] = field(default_factory=dict)
    # Of every block the values of its forward, for its backward.
    forwards: dict[int, dict[fx.Node, tuple[int, ...]]] = field(default_factory=dict)
    # The notes of the block that is being read.
    notes: Sequence[Note] = ()

    def value(self, node: fx.Node) -> int:
        (index,) = self.values[node]
        return index

    def add_input(self, placeholder: Placeholder, batch: Sequence[str], prefix: str) -> None:
        if placeholder.parameter is not None:
            kind, name = InputKind.PARAMETER, placeholder.parameter.removeprefix(prefix)
        elif placeholder.buffer is not None:
            kind, name = InputKind.BUFFER, placeholder.buffer.removeprefix(prefix)
        elif placeholder.is_tangent:
            kind, name = InputKind.TANGENT, "tangent"
        elif placeholder.position is None or placeholder.position == len(batch):
            kind, name = InputKind.RNG, "rng"
        else:
            kind, name = InputKind.BATCH, batch[placeholder.position]
        self._input(placeholder.node, kind, name, placeholder.node.meta["val"])

    def add_constant(self, node: fx.Node, module: fx.GraphModule) -> None:
        tensor = cast("Tensor", _attribute(module, str(node.target)))
        known = getattr(tensor, "constant", None)
        tensor = known if isinstance(known, Tensor) else tensor
        if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            raise UserError(
                f"{self._note(node).source or 'The model'} uses a tensor of shape {tuple(tensor.shape)} that is no "
                "registered buffer of a module; register it with register_buffer."
            )
        dense = tensor.detach().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        key = (data, _type(dense, self._note(node).source))
        if key not in self.constants:
            self._input(node, InputKind.CONSTANT, f"constant.{len(self.constants)}", dense, data)
            self.constants[key] = self.value(node)
        self.values[node] = (self.constants[key],)

    def _input(
        self, node: fx.Node, kind: InputKind, name: str, tensor: Tensor, data: bytes | None = None
    ) -> None:
        index = len(self.types)
        self.inputs.append(JointInput(kind=kind, name=name, value=index, data=data))
        self.types.append(_type(tensor, self._note(node).source))
        self.aliases.append(Alias(root=index, offset=0))
        self.values[node] = (index,)

    def add_constants_of(self, node: fx.Node) -> None:
        """The constants of a block, where it is the first of its template."""
        template, instance = self._block(node)
        self.notes = instance.notes
        for each in template.graph.module.graph.find_nodes(op="get_attr"):
            if each not in self.values:
                self.add_constant(each, template.graph.module)
        self.notes = ()

    def add_block(self, node: fx.Node) -> None:
        """The forward of the template that stands behind a node."""
        template, instance = self._block(node)
        given = [self.value(each) for each in cast("list[fx.Node]", node.args[0])]
        seeds = given[len(template.tape.outside) :]
        self.values.update(
            (each, (value,)) for each, value in zip(template.graph.inputs, given, strict=False)
        )
        self.values.update((each, (seeds[site],)) for each, site in template.seeds.items())
        self._add_nodes(template, instance, is_backward=False)
        self.values[node] = tuple(self.value(each) for each in template.outputs)
        nodes = template.graph.module.graph.nodes
        self.forwards[self._position(node)] = {
            each: self.values[each] for each in nodes if each in self.values
        }

    def add_block_backward(self, node: fx.Node) -> None:
        """The backward of the template that stands behind a node."""
        template, instance = self._block(node)
        self.values.update(self.forwards[self._position(node)])
        given = [self.value(each) for each in cast("list[fx.Node]", node.args[0])]
        tangents = [each for each in template.graph.tangents if each is not None]
        self.values.update((each, (value,)) for each, value in zip(tangents, given, strict=True))
        self._add_nodes(template, instance, is_backward=True)
        self.values[node] = tuple(
            self.value(each) for each in template.graph.gradients[:-1] if each is not None
        )

    def _add_nodes(self, template: Template, instance: Instance, *, is_backward: bool) -> None:
        self.notes = instance.notes
        for node in template.nodes:
            if node not in template.seeds and template.is_backward[node] == is_backward:
                self.add_node(node)
        self.notes = ()

    def _position(self, node: fx.Node) -> int:
        return cast("int", node.args[1])

    def _block(self, node: fx.Node) -> tuple[Template, Instance]:
        instance = self.instances[self._position(node)]
        if instance.template is None:
            raise InternalError("a block stands in the joint graph without a template")
        return instance.template, instance

    def _facts(self, node: fx.Node) -> _Facts:
        found = self.known.get(node)
        if found is not None:
            return found
        op = node.target
        place = self._note(node)
        if not isinstance(op, torch._ops.OpOverload):
            raise UserError(
                f"{place.source or 'The model'} uses {op}, which zeroir cannot look into; call the function "
                "in it directly."
            )
        _check(op, place.source, node.meta["val"])
        beyond = is_beyond(node)
        if beyond is not None:
            raise UserError(f"{place.source or 'The model'} takes a strided view that {beyond}.")
        tensors = _tensors(node.meta["val"])
        is_view = op is not aten.view.dtype and op.is_view
        found = self.known[node] = _Facts(
            op=op,
            kinds=tuple(None if x is None else _type(x, place.source) for x in tensors),
            offsets=_offsets(node, tensors) if is_view else (0,) * len(tensors),
            is_view=is_view,
            is_backward=is_backward(node),
            is_gradient_sum=is_gradient_sum(node) and op is aten.add.Tensor,
            flops=flops(op, *_fake_arguments(node), node.meta["val"]),
        )
        return found

    def _note(self, node: fx.Node) -> Note:
        """Where a node comes from; a template's node says which step of which call."""
        note = note_of(node)
        if isinstance(note, int):
            note = self.notes[note]
        return note if isinstance(note, Note) else _NO_NOTE

    def add_node(self, node: fx.Node) -> None:
        """A call of an operator, unless it changes nothing."""
        if node.target is operator.getitem:
            source, position = cast("tuple[fx.Node, int]", node.args)
            self.values[node] = (self.values[source][position],)
            return
        facts = self._facts(node)
        first = self._first(node)
        parent = first if facts.is_view else None
        kind = facts.kinds[0] if facts.kinds else None
        if facts.op in _COPIES and first is not None and kind and self.types[first] == kind:
            self.values[node] = (first,)
            return
        # A view may be taken of a copy that was left out, which began at 0 in a storage of its own.
        offset = 0 if parent is None else self.aliases[parent].offset
        offsets = [offset + step for step in facts.offsets]
        if parent is not None and len(facts.kinds) == 1 and kind is not None:
            undone = self._ancestor(parent, kind, offsets[0])
            if undone is not None:
                self.values[node] = (undone,)
                return
        results: list[int] = []
        for made, offset in zip(facts.kinds, offsets, strict=True):
            index = len(self.types)
            results.append(index)
            self.types.append(made)
            if parent is None or made is None:
                self.aliases.append(Alias(root=index, offset=0))
            else:
                self.aliases.append(Alias(root=self.aliases[parent].root, offset=offset))
                self.parents[index] = parent
        self.values[node] = tuple(results)
        note = self._note(node)
        args, kwargs = self._arguments(facts.op, node)
        # What the tracer adds at the end to look at a gradient in the parameter's way is not marked.
        is_backward = facts.is_backward or (
            note is _NO_NOTE
            and any(not self.late.isdisjoint(self.values[each]) for each in node.all_input_nodes)
        )
        self.late.update(results if is_backward else ())
        self.nodes.append(
            JointNode(
                op=str(facts.op),
                args=args,
                kwargs=kwargs,
                results=tuple(results),
                is_backward=is_backward,
                is_view=parent is not None,
                is_gradient_sum=facts.is_gradient_sum,
                calls=None if note is _NO_NOTE else note.calls,
                origin=None if note is _NO_NOTE else note.origin,
                source=note.source,
                flops=facts.flops,
            )
        )

    def _first(self, node: fx.Node) -> int | None:
        first = node.args[0] if node.args else None
        return self.value(first) if isinstance(first, fx.Node) else None

    def _ancestor(self, parent: int, kind: TensorType, offset: int) -> int | None:
        """The value further up a chain of views that a view equals, if it undoes them."""
        alias = Alias(root=self.aliases[parent].root, offset=offset)
        at: int | None = parent
        while at is not None:
            if self.aliases[at] == alias and self.types[at] == kind:
                return at
            at = self.parents.get(at)
        return None

    def _arguments(
        self, op: torch._ops.OpOverload, node: fx.Node
    ) -> tuple[tuple[NodeArg, ...], tuple[tuple[str, NodeArg], ...]]:
        args = [self._argument(arg, node) for arg in _without_nothing(op, node)]
        kwargs = {name: self._argument(arg, node) for name, arg in node.kwargs.items()}
        defaults = {arg.name: arg.default_value for arg in op._schema.arguments}
        dropped = {"pin_memory"} | {
            name for name, arg in kwargs.items() if arg is None and defaults.get(name) is None
        }
        return tuple(args), tuple((k, v) for k, v in kwargs.items() if k not in dropped)

    def _argument(self, arg: object, node: fx.Node) -> NodeArg:
        match arg:
            case fx.Node():
                return Ref(self.value(arg))
            case list() | tuple():
                return tuple(self._argument(item, node) for item in arg)
            case torch.dtype():
                if arg not in IR_DTYPE:
                    raise UserError(_no_dtype(arg, self._note(node).source))
                return IR_DTYPE[arg]
            case torch.device():
                return Symbol("device")
            case torch.layout() | torch.memory_format():
                return Symbol(str(arg).removeprefix("torch."))
            case None | bool() | int() | float() | str():
                return arg
            case _:
                raise UserError(
                    f"{self._note(node).source or 'The model'} passes a {type(arg).__name__} to {node.target}, which "
                    "programs cannot hold."
                )


def _without_nothing(op: torch._ops.OpOverload, node: fx.Node) -> tuple[object, ...]:
    """The arguments, without the empty tensors of shape (0,) that a concatenation passes over."""
    if op is not aten.cat.default:
        return node.args
    tensors, *others = cast("tuple[list[fx.Node], int]", node.args)
    kept = [tensor for tensor in tensors if tensor.meta["val"].shape != (0,)]
    return (kept or tensors, *others)


def _check(op: torch._ops.OpOverload, place: str, value: object) -> None:
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise UserError(
            f"{place or 'The model'} draws random numbers with {op}, which programs cannot: they have no "
            "hidden random state. Pass the numbers in with the batch, or draw uniform or normal ones."
        )
    if op._schema.is_mutable:
        raise InternalError(f"the joint graph changes a tensor in place with {op} ({place})")
    refused = refusal(str(op))
    if refused is not None:
        if isinstance(value, Tensor):
            _type(value, place)  # The better reason, where there is one.
        raise UserError(f"{place or 'The model'} uses the operator {op}, which {refused}.")


def _tensors(value: object) -> list[Tensor | None]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item if isinstance(item, Tensor) else None for item in value]
    raise InternalError(f"a node of the joint graph yields {type(value).__name__}")


def _offsets(node: fx.Node, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """How many elements after the first of what it is a view of each result begins."""
    (source, *_) = node.args
    start = cast("fx.Node", source).meta["val"].storage_offset()
    # What has no elements may begin anywhere; here it does where its source does, which is within a buffer.
    return tuple(
        0 if x is None or not x.numel() else int(x.storage_offset() - start) for x in tensors
    )


def _type(tensor: Tensor, place: str) -> TensorType:
    if tensor.dtype not in IR_DTYPE:
        raise UserError(_no_dtype(tensor.dtype, place))
    return TensorType(
        dtype=IR_DTYPE[tensor.dtype],
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()),
    )


def _no_dtype(dtype: torch.dtype, place: str) -> str:
    return f"{place or 'The model'} makes a tensor of {dtype}, an element type that programs do not have."


def _attribute(module: object, name: str) -> object:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _fake_arguments(node: fx.Node) -> tuple[tuple[object, ...], dict[str, object]]:
    args = tuple(_fake(arg) for arg in node.args)
    return args, {name: _fake(arg) for name, arg in node.kwargs.items()}


def _fake(arg: object) -> object:
    """An argument with the fake tensors that the tracer saw."""
    if isinstance(arg, fx.Node):
        return arg.meta.get("val")
    if isinstance(arg, list | tuple):
        return [_fake(item) for item in arg]
    return arg


def _without_dead_nodes(joint: Joint) -> Joint:
    needed = {joint.loss, *(v for _, v in joint.gradients), *(v for _, v in joint.mutations)}
    kept: list[JointNode] = []
    for node in reversed(joint.nodes):
        if needed.intersection(node.results):
            kept.append(node)
            needed.update(node.refs())
    return Joint(
        inputs=joint.inputs,
        nodes=tuple(reversed(kept)),
        types=joint.types,
        aliases=joint.aliases,
        loss=joint.loss,
        gradients=joint.gradients,
        mutations=joint.mutations,
    )
