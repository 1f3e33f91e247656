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
from zeroir.frontend.tracking import Note
from zeroir.ir.allowlist import refusal
from zeroir.ir.segment import NodeArg, Ref, Symbol, TensorType
from zeroir.torch_ops.types import IR_DTYPE

aten = torch.ops.aten

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


def read_graph(graph: JointGraph, batch: Sequence[str], prefix: str) -> Joint:
    """The joint graph as plain data. ``batch`` are the paths of the batch's tensors; the seeds come after them.

    ``prefix`` is stripped from the names of parameters and buffers.

    Raises:
        UserError: where the model uses an operator or element type that programs do not have.
    """
    reader = _Reader()
    for placeholder in graph.placeholders:
        reader.add_input(placeholder, batch, prefix)
    for node in graph.module.graph.nodes:
        if node.op == "get_attr":
            reader.add_constant(node, graph.module)
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
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


@dataclass
class _Reader:
    inputs: list[JointInput] = field(default_factory=list)
    nodes: list[JointNode] = field(default_factory=list)
    types: list[TensorType | None] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    # Of every fx node the numbers of its results, and whether it has just the one.
    values: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    # Of every view the value that it was made from.
    parents: dict[int, int] = field(default_factory=dict)

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
                f"{_source(node) or 'The model'} uses a tensor of shape {tuple(tensor.shape)} that is no "
                "registered buffer of a module; register it with register_buffer."
            )
        dense = tensor.detach().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        for item in self.inputs:
            if item.data == data and self.types[item.value] == _type(dense, node):
                self.values[node] = (item.value,)
                return
        self._input(node, InputKind.CONSTANT, f"constant.{self._constants()}", dense, data)

    def _constants(self) -> int:
        return sum(item.kind is InputKind.CONSTANT for item in self.inputs)

    def _input(
        self, node: fx.Node, kind: InputKind, name: str, tensor: Tensor, data: bytes | None = None
    ) -> None:
        index = len(self.types)
        self.inputs.append(JointInput(kind=kind, name=name, value=index, data=data))
        self.types.append(_type(tensor, node))
        self.aliases.append(Alias(root=index, offset=0))
        self.values[node] = (index,)

    def add_node(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, position = cast("tuple[fx.Node, int]", node.args)
            self.values[node] = (self.values[source][position],)
            return
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            raise UserError(
                f"{_source(node) or 'The model'} uses {op}, which zeroir cannot look into; call the function "
                "in it directly."
            )
        _check(op, node)
        tensors = _tensors(node.meta["val"])
        parent = self._viewed(op, node)
        first = self._first(node)
        if op in _COPIES and first is not None and _is_same(self.types[first], tensors[0], node):
            self.values[node] = (first,)
            return
        if parent is not None and len(tensors) == 1 and tensors[0] is not None:
            undone = self._ancestor(parent, node.meta["val"], tensors[0], node)
            if undone is not None:
                self.values[node] = (undone,)
                return
        results: list[int] = []
        for tensor in tensors:
            index = len(self.types)
            results.append(index)
            self.types.append(None if tensor is None else _type(tensor, node))
            if parent is None or tensor is None:
                self.aliases.append(Alias(root=index, offset=0))
            else:
                self.aliases.append(self._alias(parent, tensor))
                self.parents[index] = parent
        self.values[node] = tuple(results)
        note = note_of(node)
        args, kwargs = self._arguments(op, node)
        self.nodes.append(
            JointNode(
                op=str(op),
                args=args,
                kwargs=kwargs,
                results=tuple(results),
                is_backward=is_backward(node),
                is_view=parent is not None,
                is_gradient_sum=is_gradient_sum(node) and op is aten.add.Tensor,
                calls=note.calls if isinstance(note, Note) else None,
                origin=note.origin if isinstance(note, Note) else None,
                source=_source(node),
                flops=flops(op, *_fake_arguments(node), node.meta["val"]),
            )
        )

    def _first(self, node: fx.Node) -> int | None:
        first = node.args[0] if node.args else None
        return self.value(first) if isinstance(first, fx.Node) else None

    def _viewed(self, op: torch._ops.OpOverload, node: fx.Node) -> int | None:
        """The value whose storage the results look into."""
        if op is aten.view.dtype or not op.is_view:
            return None
        return self._first(node)

    def _alias(self, parent: int, tensor: Tensor) -> Alias:
        return Alias(root=self.aliases[parent].root, offset=int(tensor.storage_offset()))

    def _ancestor(self, parent: int, _: object, tensor: Tensor, node: fx.Node) -> int | None:
        """The value further up a chain of views that a view equals, if it undoes them."""
        alias, kind = self._alias(parent, tensor), _type(tensor, node)
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
                    raise UserError(_no_dtype(arg, node))
                return IR_DTYPE[arg]
            case torch.device():
                return Symbol("device")
            case torch.layout() | torch.memory_format():
                return Symbol(str(arg).removeprefix("torch."))
            case None | bool() | int() | float() | str():
                return arg
            case _:
                raise UserError(
                    f"{_source(node) or 'The model'} passes a {type(arg).__name__} to {node.target}, which "
                    "programs cannot hold."
                )


def _without_nothing(op: torch._ops.OpOverload, node: fx.Node) -> tuple[object, ...]:
    """The arguments, without the empty tensors of shape (0,) that a concatenation passes over."""
    if op is not aten.cat.default:
        return node.args
    tensors, *others = cast("tuple[list[fx.Node], int]", node.args)
    kept = [tensor for tensor in tensors if tensor.meta["val"].shape != (0,)]
    return (kept or tensors, *others)


def _check(op: torch._ops.OpOverload, node: fx.Node) -> None:
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise UserError(
            f"{_source(node) or 'The model'} draws random numbers with {op}; programs have no hidden random "
            "state, so use torch.nn.functional.dropout or pass the numbers in with the batch."
        )
    if op._schema.is_mutable:
        raise InternalError(
            f"the joint graph changes a tensor in place with {op} ({_source(node)})"
        )
    refused = refusal(str(op))
    if refused is not None:
        raise UserError(f"{_source(node) or 'The model'} uses the operator {op}, which {refused}.")


def _is_same(kind: TensorType | None, tensor: Tensor | None, node: fx.Node) -> bool:
    return tensor is not None and kind == _type(tensor, node)


def _tensors(value: object) -> list[Tensor | None]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item if isinstance(item, Tensor) else None for item in value]
    raise InternalError(f"a node of the joint graph yields {type(value).__name__}")


def _type(tensor: Tensor, node: fx.Node) -> TensorType:
    if tensor.dtype not in IR_DTYPE:
        raise UserError(_no_dtype(tensor.dtype, node))
    return TensorType(
        dtype=IR_DTYPE[tensor.dtype],
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()),
    )


def _no_dtype(dtype: torch.dtype, node: fx.Node) -> str:
    place = _source(node) or "The model"
    return f"{place} makes a tensor of {dtype}, an element type that programs do not have."


def _source(node: fx.Node) -> str:
    note = note_of(node)
    return note.source if isinstance(note, Note) else ""


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
