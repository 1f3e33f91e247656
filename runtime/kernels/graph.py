"""A segment and its destinations as one graph of torch operators, for a compiler.

The graph takes the arguments and then the destinations, and returns nothing. Where sizes depend on dims, its first
input is a tensor whose shape has the values of the dims, from which the graph computes all sizes.

The value of an output is stored in its destination as soon as it exists, and later nodes read it there, so that no
value is in memory twice. Matrix products write directly to the destination (``torch_ops.out_variants``); by itself
Inductor would compute them in a tensor of its own and copy it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, floordiv, mul
from typing import Final, assert_never

import torch
from torch import fx

from zeroir.ir.analysis.instances import sizes_in
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.ir.segments.size_numbers import FUNCTIONS, SizeNumber
from zeroir.ir.sizes import Dim, Factor, Size
from zeroir.runtime.kernels.calls import constant, has_ref, is_multiple, operator
from zeroir.workspace.eager_plan import OutputTarget, Permute, Reshape, in_place

Argument = fx.node.Argument


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutputs:
    """The outputs that a segment's graph writes to its additional inputs, by index, in the order of these inputs.

    ``direct`` are the outputs that the graph writes to their destinations; ``scratch`` those whose destination overlaps
    other tensors of the call, so that they are copied or added to it after everything has been read.
    """

    direct: tuple[int, ...]
    scratch: tuple[int, ...]


def graph_outputs(bindings: Sequence[Binding | None]) -> GraphOutputs:
    """Divide the outputs into those computed in their destinations and those that need scratch memory."""
    bound = [(output, binding) for output, binding in enumerate(bindings) if binding is not None]
    return GraphOutputs(
        direct=tuple(output for output, binding in bound if binding.is_exclusive),
        scratch=tuple(output for output, binding in bound if not binding.is_exclusive),
    )


def input_types(segment: Segment, bindings: Sequence[Binding | None]) -> list[TensorType]:
    """Return the types of the graph's inputs after its first: arguments, direct destinations, scratch tensors."""
    kinds = segment.types()
    outputs = graph_outputs(bindings)
    types = list(segment.inputs)
    for output in (*outputs.direct, *outputs.scratch):
        kind, binding = kinds[segment.outputs[output]], bindings[output]
        assert kind is not None
        assert binding is not None
        types.append(replace(kind, stride=binding.stride))
    return types


def unaligned_inputs(segment: Segment, bindings: Sequence[Binding | None]) -> frozenset[int]:
    """Return the inputs, as ``input_types`` numbers them, that compiled code must not expect to be aligned.

    They are direct destinations. An input that is expected to be aligned, and is not, is copied to memory that is
    before the kernel runs: the kernel would write to the copy. Scratch tensors have their own memory.
    """
    direct = enumerate(graph_outputs(bindings).direct, start=len(segment.inputs))
    return frozenset(
        index
        for index, output in direct
        if (binding := bindings[output]) is not None and not binding.is_aligned
    )


def kernel_dims(segment: Segment, bindings: Sequence[Binding | None]) -> tuple[Dim, ...]:
    """Return the dims on which sizes of a segment or its destinations depend, in the order of their names."""
    sizes = sizes_in((segment.inputs, segment.nodes, tuple(bindings)))
    dims = {dim for size in sizes for dim in size.dims}
    return tuple(sorted(dims, key=lambda dim: dim.name))


_SEEDED: Final = {"zeroir.dropout.default": 2, "zeroir.uniform.default": 1}
"""Ops that take a seed, with the position of that argument."""


def host_inputs(segment: Segment) -> frozenset[int]:
    """Return the arguments that are on the host on every device, which are seeds."""
    makers = _makers(segment)
    seeds: set[int] = set()
    for node in segment.nodes:
        if node.op not in _SEEDED:
            continue
        seed = node.args[_SEEDED[node.op]]
        while isinstance(seed, Ref) and seed.index in makers:
            seed = makers[seed.index].args[0]
        if isinstance(seed, Ref):
            seeds.add(seed.index)
    return frozenset(seeds)


def build_graph(
    segment: Segment, bindings: Sequence[Binding | None], device: torch.device
) -> fx.GraphModule:
    """Return the segment as a graph.

    Its inputs are those of ``input_types``, preceded by a tensor whose shape has the values of ``kernel_dims``, if
    there are any.
    """
    return _GraphBuilder(segment, bindings, device).build()


class _GraphBuilder:
    def __init__(
        self, segment: Segment, bindings: Sequence[Binding | None], device: torch.device
    ) -> None:
        outputs = graph_outputs(bindings)
        # A scratch tensor is private to the call, so the graph always writes to it and never adds.
        self._bindings = [
            binding
            if binding is None or binding.is_exclusive
            else replace(binding, mode=Mode.WRITE, is_exclusive=True)
            for binding in bindings
        ]
        self._segment = segment
        self._device = device
        self._graph = fx.Graph()
        self._dims: dict[Dim, fx.Node] = {}
        dims = kernel_dims(segment, bindings)
        if dims:
            shaped = self._graph.placeholder("shaped")
            for axis, dim in enumerate(dims):
                self._dims[dim] = self._call_function(torch.ops.aten.sym_size.int, shaped, axis)
        self._values: list[fx.Node] = [
            self._graph.placeholder(f"argument_{i}") for i in range(len(segment.inputs))
        ]
        self._targets = {
            output: self._graph.placeholder(f"destination_{output}")
            for output in (*outputs.direct, *outputs.scratch)
        }
        self._written: set[int] = set()

    def build(self) -> fx.GraphModule:
        segment = self._segment
        places = in_place(segment, self._bindings)
        sums = _sums(segment, self._bindings)
        for node in segment.nodes:
            first = len(self._values)
            is_done = (first in sums and self._add(node, sums[first])) or (
                first in places and self._fill(node, places[first])
            )
            if not is_done:
                self._call(node)
                for index in range(first, len(self._values)):
                    if index in places:
                        self._store(index, places[index])
        for output, (value, binding) in enumerate(
            zip(segment.outputs, self._bindings, strict=True)
        ):
            if binding is None or output in self._written:
                continue
            target, result = self._targets[output], self._values[value]
            if binding.mode is Mode.ACCUMULATE:
                result = self._call_function(torch.ops.aten.add.Tensor, target, result)
            self._call_function(torch.ops.zeroir.store.default, target, result)
        self._graph.output(())
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def _call(self, node: Node) -> None:
        """Call the node's own operator."""
        function = operator(node.op)
        args = tuple(self._argument(arg) for arg in node.args)
        kwargs = {name: self._argument(arg) for name, arg in node.kwargs}
        result = self._graph.call_function(function, args, kwargs)
        if is_multiple(function):
            picks = range(len(node.results))
            self._values += [self._graph.call_function(_pick, (result, pick)) for pick in picks]
        else:
            self._values.append(result)

    def _fill(self, node: Node, target: OutputTarget) -> bool:
        """Compute the node's result in the destination; return whether there is an operator for that."""
        args = [self._argument(arg) for arg in node.args]
        into = torch.ops.zeroir
        match node.op:
            case "aten.mm.default":
                function = into.mm_out.default
            case "aten.bmm.default":
                function = into.bmm_out.default
            case "aten.addmm.default":
                function, named = into.addmm_out.default, dict(node.kwargs)
                args += [float(_number(named.get(name, 1))) for name in ("beta", "alpha")]
            case "aten.embedding_dense_backward.default" if node.args[4] is False:
                function = into.embedding_gradient.default
                grad, indices, _, padding_idx, _ = args
                args = [grad, indices, padding_idx]
            case _:
                return False
        out = self._part(target)
        self._call_function(function, out, *args)
        self._values.append(out)
        return True

    def _add(self, node: Node, target: OutputTarget) -> bool:
        """Add the node's result to the destination in place; return whether that is possible."""
        args = [self._argument(arg) for arg in node.args]
        match node.op:
            case "aten.mm.default":
                out = self._part(target)
                self._call_function(torch.ops.zeroir.addmm_out.default, out, out, *args, 1.0, 1.0)
            case "aten.embedding_dense_backward.default" if _adds_rows(node):
                out = self._part(target)
                self._add_rows(out, *args[:2], padding=_number(node.args[3]))
            case _:
                return False
        self._values.append(out)
        return True

    def _add_rows(self, out: fx.Node, grad: Argument, rows: Argument, *, padding: float) -> None:
        """Add each row of a gradient to the destination's row that was looked up, except the padding row."""
        aten = torch.ops.aten
        if padding >= 0:
            is_padding = self._call_function(aten.eq.Scalar, rows, padding)
            everywhere = self._call_function(aten.unsqueeze.default, is_padding, -1)
            grad = self._call_function(aten.masked_fill.Scalar, grad, everywhere, 0.0)
        self._call_function(aten.index_put_.default, out, [rows], grad, True)

    def _store(self, value: int, target: OutputTarget) -> None:
        """Store a value in the destination, where later nodes read it."""
        out = self._part(target)
        self._call_function(torch.ops.zeroir.store.default, out, self._values[value])
        self._values[value] = out

    def _part(self, target: OutputTarget) -> fx.Node:
        """Return the part of a destination that a value fills, which is written now."""
        self._written.add(target.output)
        part = self._targets[target.output]
        for view in target.views:
            match view:
                case Permute(order):
                    part = self._call_function(torch.ops.aten.permute.default, part, list(order))
                case Reshape(shape):
                    sizes = [self._argument(size) for size in shape]
                    part = self._call_function(torch.ops.aten.view.default, part, sizes)
                case _:
                    assert_never(view)
        return part

    def _call_function(self, function: torch._ops.OpOverload, *args: Argument) -> fx.Node:
        return self._graph.call_function(function, args)

    def _argument(self, arg: NodeArg) -> Argument:
        if isinstance(arg, Ref):
            return self._values[arg.index]
        if isinstance(arg, Size):
            return self._size(arg)
        if isinstance(arg, SizeNumber):
            _, function = FUNCTIONS[arg.function]
            return self._graph.call_function(function, tuple(map(self._argument, arg.operands)))
        if isinstance(arg, tuple) and (has_ref(arg) or any(isinstance(x, Size) for x in arg)):
            return [self._argument(item) for item in arg]
        return constant(arg, self._device)

    def _size(self, size: Size) -> fx.Node:
        """Return a size, computed from the dims."""
        total: Argument = None
        for coefficient, monomial in size.terms:
            product: Argument = coefficient
            for factor, power in monomial:
                for _ in range(power):
                    value = self._factor(factor)
                    product = (
                        value if product == 1 else self._graph.call_function(mul, (product, value))
                    )
            total = product if total is None else self._graph.call_function(add, (total, product))
        assert isinstance(total, fx.Node)
        return total

    def _factor(self, factor: Factor) -> fx.Node:
        if isinstance(factor, Dim):
            return self._dims[factor]
        return self._graph.call_function(floordiv, (self._size(factor.dividend), factor.divisor))


def _sums(segment: Segment, bindings: Sequence[Binding | None]) -> Mapping[int, OutputTarget]:
    """Return the values that are only added to one destination, each with the part of it that the value fills."""
    written = [
        replace(binding, mode=Mode.WRITE)
        if binding is not None and binding.mode is Mode.ACCUMULATE
        else None
        for binding in bindings
    ]
    uses = Counter(ref.index for node in segment.nodes for ref in node.refs())
    uses.update(segment.outputs)
    makers = _makers(segment)

    def is_only_for(output: int, made: int) -> bool:
        value = segment.outputs[output]
        while value != made and uses[value] == 1:
            (source,) = makers[value].refs()
            value = source.index
        return uses[value] == 1

    candidates = in_place(segment, written)
    return {
        value: target for value, target in candidates.items() if is_only_for(target.output, value)
    }


def _makers(segment: Segment) -> Mapping[int, Node]:
    """Return the node that computes each value."""
    makers: dict[int, Node] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        makers.update(dict.fromkeys(range(first, first + len(node.results)), node))
        first += len(node.results)
    return makers


def _adds_rows(node: Node) -> bool:
    """Return whether an embedding's gradient may be added row by row; 16 bits would round each sum too coarsely."""
    (kind,) = node.results
    return node.args[4] is False and kind is not None and kind.dtype is DType.F32


def _number(arg: NodeArg) -> float:
    assert isinstance(arg, int | float)
    return arg


def _pick(results: Sequence[fx.Node], index: int) -> fx.Node:
    return results[index]
