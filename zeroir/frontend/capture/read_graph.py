"""Reads torch's joint graph into plain data, and checks that a program can represent it.

Ops without effect (``detach``, a copy of equal type, a view that undoes another one) are omitted, and so are nodes on
which no output depends.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, fx

from zeroir.errors import InternalError, ShapesError, UserError
from zeroir.frontend._torch_dim_nodes import NumberNode
from zeroir.frontend._torch_private import (
    Placeholder,
    TracedGraph,
    annotation_of,
)
from zeroir.frontend.capture.blocks.graph import BlockGraph
from zeroir.frontend.capture.blocks.reuse import ReusePlan
from zeroir.frontend.capture.captured_graph import (
    Alias,
    CapturedGraph,
    GraphInput,
    GraphNode,
    InputKind,
    OutputName,
)
from zeroir.frontend.capture.node_facts import (
    NodeFacts,
    NotInProgramsError,
    facts_of,
    require_dtype,
    size_in,
    tensor_type,
)
from zeroir.frontend.capture.node_origins import UNKNOWN_ORIGIN, NodeOrigin, origin_of
from zeroir.frontend.capture.outside_tensors import OutsideTensors
from zeroir.frontend.opaque.choice import UntraceableError
from zeroir.frontend.source.unsupported import MAKE_PART_OF_MODEL
from zeroir.ir.segments.segment import NodeArg, Ref, Symbol, TensorType
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


def read_graph(
    graph: TracedGraph,
    batch: Sequence[str],
    prefix: str,
    place: str,
    plan: ReusePlan | None = None,
    outputs: Sequence[OutputName] = (),
    outside: OutsideTensors | None = None,
) -> CapturedGraph:
    """Return the joint graph as plain data.

    ``batch`` are the paths of the batch's tensors, which precede the seeds and the rank. ``outputs`` are the names of
    the graph's outputs after the loss. ``prefix`` is removed from the names of parameters and buffers. ``place``
    replaces the line in errors for nodes that the tracer created on its own. A node for the call of a whole block is
    replaced by the nodes of its block graph in ``plan``. ``outside`` are the tensors of the user's code that are not
    the model's.

    Raises:
        UserError: if the model uses an operator, element type or argument that programs do not have.
    """
    reader = _Reader(place, plan, outside or OutsideTensors())
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
    joint = CapturedGraph(
        place=place,
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
        outputs=tuple(
            (name, reader.value(node)) for name, node in zip(outputs, graph.outputs, strict=True)
        ),
    )
    return without_dead_nodes(joint)


@dataclass
class _Reader:
    place: str
    plan: ReusePlan | None
    outside: OutsideTensors
    inputs: list[GraphInput] = field(default_factory=list)
    nodes: list[GraphNode] = field(default_factory=list)
    types: list[TensorType | None] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    # the numbers of the results of every fx node
    values: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[tuple[bytes, TensorType, int], int] = field(default_factory=dict)
    # the value that each view was created from
    parents: dict[int, int] = field(default_factory=dict)
    # the values that the backward computes
    backward_values: set[int] = field(default_factory=set)
    # The nodes of a block graph are read once for each call of the block.
    facts: dict[fx.Node, NodeFacts] = field(default_factory=dict)
    # the values of the forward of each block, for its backward
    forwards: dict[int, dict[fx.Node, tuple[int, ...]]] = field(default_factory=dict)
    # the origins of the block that is being read
    origins: Sequence[NodeOrigin] = ()

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
        elif placeholder.position > len(batch):
            kind, name = InputKind.RANK, "rank"
        else:
            kind, name = InputKind.BATCH, batch[placeholder.position]
        self._input(placeholder.node, kind, name, placeholder.node.meta["val"])

    def add_constant(self, node: fx.Node, module: fx.GraphModule) -> None:
        tensor = cast("Tensor", _attribute(module, str(node.target)))
        constant = getattr(tensor, "constant", None)
        tensor = constant if isinstance(constant, Tensor) else tensor
        if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            raise UserError(
                f"{self._place(node)} uses a tensor of shape {tuple(tensor.shape)} that is not a parameter or buffer "
                f"of the model: {MAKE_PART_OF_MODEL}."
            )
        if tensor.requires_grad:
            raise UserError(
                f"{self._place(node)} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient and is no "
                "parameter of the model. A second module may have an engine of its own (then both optimizers are "
                'instances), be sharded and untrained (frozen={"critic": critic}), or stay in the closure with '
                "requires_grad_(False). What this engine trains must be the model's, and a loss function or hook uses "
                f"the module that it is given: {MAKE_PART_OF_MODEL}."
            )
        dense = tensor.detach().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        # Two of the user's tensors with the same values may differ later.
        outside = self.outside.holder(tensor)
        key = (data, tensor_type(dense, self._place(node)), id(outside))
        if key not in self.constants:
            name = f"constant.{len(self.constants)}"
            self._input(node, InputKind.CONSTANT, name, dense, data, outside)
            self.constants[key] = self.value(node)
        self.values[node] = (self.constants[key],)

    def _input(
        self,
        node: fx.Node,
        kind: InputKind,
        name: str,
        tensor: Tensor,
        data: bytes | None = None,
        outside: Tensor | None = None,
    ) -> None:
        index = len(self.types)
        self.inputs.append(
            GraphInput(kind=kind, name=name, value=index, data=data, outside=outside)
        )
        self.types.append(tensor_type(tensor, self._place(node)))
        self.aliases.append(Alias(root=index, offset=0))
        self.values[node] = (index,)

    def add_constants_of(self, node: fx.Node) -> None:
        """Add the constants of a block graph, unless another call of the block has added them."""
        graph, self.origins = self._block(node)
        for constant in graph.graph.module.graph.find_nodes(op="get_attr"):
            if constant not in self.values:
                self.add_constant(constant, graph.graph.module)
        self.origins = ()

    def add_block(self, node: fx.Node) -> None:
        """Add the forward of the block graph for the call that a node represents."""
        graph, origins = self._block(node)
        inputs = [self.value(arg) for arg in cast("list[fx.Node]", node.args[0])]
        seeds = inputs[len(graph.sequence.inputs) :]
        self.values.update(
            (arg, (value,)) for arg, value in zip(graph.graph.inputs, inputs, strict=False)
        )
        self.values.update((arg, (seeds[site],)) for arg, site in graph.seeds.items())
        self._add_nodes(graph, origins, is_backward=False)
        self.values[node] = tuple(self.value(output) for output in graph.outputs)
        self.forwards[self._call_index(node)] = {
            inner: self.values[inner]
            for inner in graph.graph.module.graph.nodes
            if inner in self.values
        }

    def add_block_backward(self, node: fx.Node) -> None:
        """Add the backward of the block graph for the call that a node represents."""
        graph, origins = self._block(node)
        self.values.update(self.forwards[self._call_index(node)])
        values = [self.value(arg) for arg in cast("list[fx.Node]", node.args[0])]
        tangents = [tangent for tangent in graph.graph.tangents if tangent is not None]
        self.values.update(
            (tangent, (value,)) for tangent, value in zip(tangents, values, strict=True)
        )
        self._add_nodes(graph, origins, is_backward=True)
        self.values[node] = tuple(
            self.value(gradient) for gradient in graph.graph.gradients[:-1] if gradient is not None
        )

    def _add_nodes(
        self, graph: BlockGraph, origins: Sequence[NodeOrigin], *, is_backward: bool
    ) -> None:
        self.origins = origins
        for node in graph.nodes:
            if node not in graph.seeds and graph.is_backward[node] == is_backward:
                self.add_node(node)
        self.origins = ()

    def _call_index(self, node: fx.Node) -> int:
        return cast("int", node.args[1])

    def _block(self, node: fx.Node) -> tuple[BlockGraph, Sequence[NodeOrigin]]:
        """Return the graph of the block whose call a node represents, and the origins of the calls in it."""
        if self.plan is None:
            raise InternalError("the joint graph has a node for a block without a block graph")
        index = self._call_index(node)
        return self.plan.graphs[index], self.plan.origins(index)

    def _facts(self, node: fx.Node) -> NodeFacts:
        facts = self.facts.get(node)
        if facts is None:
            facts = self.facts[node] = facts_of(node, self._place(node))
        return facts

    def _facts_or_module(self, node: fx.Node) -> NodeFacts:
        """Return the facts of a node; where no program can hold it, the error names the module."""
        try:
            return self._facts(node)
        except NotInProgramsError as error:
            raise UntraceableError(str(error), self._module(node)) from error
        except ShapesError as error:
            error.module = self._module(node)
            raise

    def _module(self, node: fx.Node) -> str | None:
        """Return the name of the innermost module that a node is part of; None if it is no module's."""
        calls = self._origin(node).calls
        return calls[-1].module if calls else None

    def _place(self, node: fx.Node) -> str:
        """Return ``file:line`` of a node, for errors."""
        return self._origin(node).source or self.place

    def _origin(self, node: fx.Node) -> NodeOrigin:
        """Return the origin of a node; the annotation of a block graph's node is the index of a call in the block."""
        annotation = annotation_of(node)
        return self.origins[annotation] if isinstance(annotation, int) else origin_of(node)

    def add_node(self, node: fx.Node) -> None:
        """Add a call of an operator, unless it has no effect."""
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            return  # a number, which its users hold as an argument
        if node.target is operator.getitem:
            tensors, position = cast("tuple[fx.Node, int]", node.args)
            self.values[node] = (self.values[tensors][position],)
            return
        facts = self._facts_or_module(node)
        operand = self._first_operand(node)
        parent = operand if facts.is_view else None
        first_type = facts.types[0] if facts.types else None
        is_copy = facts.op in _COPIES and operand is not None and first_type is not None
        if is_copy and operand is not None and self.types[operand] == first_type:
            self.values[node] = (operand,)
            return
        # Relative to the root: the viewed tensor may be an omitted copy, with its own storage.
        offset = 0 if parent is None else self.aliases[parent].offset
        offsets = [offset + step for step in facts.offsets]
        if parent is not None and len(facts.types) == 1 and first_type is not None:
            ancestor = self._equal_ancestor(parent, first_type, offsets[0])
            if ancestor is not None:
                self.values[node] = (ancestor,)
                return
        results: list[int] = []
        for result_type, offset in zip(facts.types, offsets, strict=True):
            index = len(self.types)
            results.append(index)
            self.types.append(result_type)
            if parent is None or result_type is None:
                self.aliases.append(Alias(root=index, offset=0))
            else:
                self.aliases.append(Alias(root=self.aliases[parent].root, offset=offset))
                self.parents[index] = parent
        self.values[node] = tuple(results)
        origin = self._origin(node)
        args, kwargs = self._arguments(facts.op, node)
        # The tracer does not mark the nodes that it adds last, which give a gradient the layout of its parameter.
        is_backward = facts.is_backward or (
            origin is UNKNOWN_ORIGIN
            and any(
                not self.backward_values.isdisjoint(self.values.get(arg, ()))
                for arg in node.all_input_nodes
            )
        )
        self.backward_values.update(results if is_backward else ())
        self.nodes.append(
            GraphNode(
                op=str(facts.op),
                args=args,
                kwargs=kwargs,
                results=tuple(results),
                is_backward=is_backward,
                is_view=parent is not None,
                is_gradient_sum=facts.is_gradient_sum,
                calls=None if origin is UNKNOWN_ORIGIN else origin.calls,
                origin=None if origin is UNKNOWN_ORIGIN else origin.number,
                source=origin.source,
                flops=facts.flops,
                workspace_bytes=facts.workspace_bytes,
            )
        )

    def _first_operand(self, node: fx.Node) -> int | None:
        first = node.args[0] if node.args else None
        # A size that torch computed is no value.
        return self.value(first) if isinstance(first, fx.Node) and first in self.values else None

    def _equal_ancestor(self, parent: int, kind: TensorType, offset: int) -> int | None:
        """Return the ancestor in a chain of views that equals a new view, if that undoes the views between them."""
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
        args = [self._argument(arg, node) for arg in _without_empty_tensors(op, node)]
        kwargs = {name: self._argument(arg, node) for name, arg in node.kwargs.items()}
        defaults = {arg.name: arg.default_value for arg in op._schema.arguments}
        dropped = {"pin_memory"} | {
            name for name, arg in kwargs.items() if arg is None and defaults.get(name) is None
        }
        return tuple(args), tuple((k, v) for k, v in kwargs.items() if k not in dropped)

    def _number(self, number: object, node: fx.Node) -> int | float | None:
        """Return the size, or the number of sizes, that an argument is; None where it is a tensor."""
        match number:
            case torch.SymInt():
                try:
                    return size_in(number, self._place(node))
                except ShapesError as error:
                    error.module = self._module(node)
                    raise
            case torch.SymFloat() if isinstance(number.node, NumberNode):
                return number.node.number
            case torch.SymFloat() | torch.SymBool():
                raise ShapesError(
                    f"{self._place(node)} passes a number to {node.target} that depends on the sizes of the batch in "
                    "a way that programs do not have: compute it with tensors, or give that dimension one size.",
                    module=self._module(node),
                )
            case _:
                return None

    def _argument(self, arg: object, node: fx.Node) -> NodeArg:
        match arg:
            case fx.Node():
                number = self._number(arg.meta.get("val"), node)
                return Ref(self.value(arg)) if number is None else number
            case list() | tuple():
                return tuple(self._argument(item, node) for item in arg)
            case torch.dtype():
                require_dtype(arg, self._place(node))
                return IR_DTYPE[arg]
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self._number(arg, node)
            case torch.device():
                return Symbol("device")
            case torch.layout() | torch.memory_format():
                return Symbol(str(arg).removeprefix("torch."))
            case None | bool() | int() | float() | str():
                return arg
            case _:
                raise UserError(
                    f"{self._place(node)} passes a {type(arg).__name__} to {node.target}, which "
                    "programs cannot hold."
                )


def _without_empty_tensors(op: torch._ops.OpOverload, node: fx.Node) -> tuple[object, ...]:
    """Return the arguments, without the tensors of shape (0,) that a concatenation ignores."""
    if op is not aten.cat.default:
        return node.args
    tensors, *rest = cast("tuple[list[fx.Node], int]", node.args)
    nonempty = [tensor for tensor in tensors if tensor.meta["val"].shape != (0,)]
    return (nonempty or tensors, *rest)


def _attribute(module: object, name: str) -> object:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def without_dead_nodes(joint: CapturedGraph) -> CapturedGraph:
    """Return the graph with only the nodes on which its results depend."""
    results = (joint.gradients, joint.mutations, joint.outputs)
    needed = {joint.loss, *(value for pairs in results for _, value in pairs)}
    live: list[GraphNode] = []
    for node in reversed(joint.nodes):
        if needed.intersection(node.results):
            live.append(node)
            needed.update(node.refs())
    return replace(joint, nodes=tuple(reversed(live)))
