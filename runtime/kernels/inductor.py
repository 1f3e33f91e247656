"""Segments compiled by Inductor, with their results written where they belong.

The segment becomes a graph whose inputs are the arguments *and* the destinations. A matrix product that ends in a
destination (a weight gradient) is handed to ``zeroir::mm_into``, which writes straight into the view of the flat
gradient: left to itself Inductor makes the product in a buffer of its own and copies it over. Every other result is a
``copy_`` or ``add_`` to its destination, which Inductor fuses with what makes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zeroir.ir.ops import Mode
from zeroir.ir.segment import NodeArg, Ref, Segment
from zeroir.runtime.kernels.base import Binding, Kernel
from zeroir.runtime.kernels.calls import constant, has_ref, is_multiple, operator
from zeroir.runtime.kernels.eager import Undo, in_place


@torch.library.custom_op("zeroir::mm_into", mutates_args=("out",))
def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the matrix product of ``a`` (n, k) and ``b`` (k, m) into ``out`` (n, m) of any strides."""
    torch.mm(a, b, out=out)


class InductorKernels:
    """Segments compiled on one device; a kernel is compiled when it first runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[tuple[str, tuple[Binding | None, ...]], Kernel] = {}

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """See ``Kernels.compile``."""
        key = (segment.digest(), tuple(bindings))
        if key not in self._compiled:
            graph = build_graph(segment, bindings, self._device)
            self._compiled[key] = InductorKernel(
                function=torch.compile(graph, fullgraph=True, dynamic=False),
                used=tuple(i for i, binding in enumerate(bindings) if binding is not None),
            )
        return self._compiled[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorKernel:
    """A compiled graph; ``used`` are the outputs that have a destination."""

    function: Callable[..., object]
    used: tuple[int, ...]

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        """See ``Kernel``."""
        self.function(*arguments, *(destinations[output] for output in self.used))


def build_graph(
    segment: Segment, bindings: Sequence[Binding | None], device: torch.device
) -> fx.GraphModule:
    """The segment as a graph of torch operators that fills its destinations and returns nothing."""
    graph = fx.Graph()
    values: list[fx.Node] = [graph.placeholder(f"argument_{i}") for i in range(len(segment.inputs))]
    targets = {
        output: graph.placeholder(f"destination_{output}")
        for output, binding in enumerate(bindings)
        if binding is not None
    }
    products = {
        value: place
        for value, place in in_place(segment, bindings).items()
        if _maker(segment, value) == "aten.mm.default"
    }
    for node in segment.nodes:
        function = operator(node.op)
        args = tuple(_argument(arg, values, device) for arg in node.args)
        first = len(values)
        if first in products:
            output, undo = products[first]
            out = _undone(graph, targets[output], undo)
            graph.call_function(torch.ops.zeroir.mm_into.default, (out, *args))
            values.append(out)
            continue
        kwargs = {name: _argument(arg, values, device) for name, arg in node.kwargs}
        result = graph.call_function(function, args, kwargs)
        if is_multiple(function):
            picks = range(len(node.results))
            values += [graph.call_function(_pick, (result, pick)) for pick in picks]
        else:
            values.append(result)
    written = {output for output, _ in products.values()}
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or output in written:
            continue
        is_write = binding.mode is Mode.WRITE
        store = torch.ops.aten.copy_.default if is_write else torch.ops.aten.add_.Tensor
        graph.call_function(store, (targets[output], values[value]))
    graph.output(())
    graph.eliminate_dead_code(is_impure_node=_has_effect)
    return fx.GraphModule(torch.nn.Module(), graph)


def _has_effect(node: fx.Node) -> bool:
    """What dead-code elimination must keep: inputs, and whatever writes."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _pick(results: Sequence[Tensor], index: int) -> Tensor:
    return results[index]


def _undone(graph: fx.Graph, target: fx.Node, undo: Undo | None) -> fx.Node:
    return target if undo is None else graph.call_function(undo, (target,))


def _maker(segment: Segment, value: int) -> str:
    """The operator that makes a value."""
    first = len(segment.inputs)
    for node in segment.nodes:
        if first <= value < first + len(node.results):
            return node.op
        first += len(node.results)
    return ""


Argument = fx.node.Argument


def _argument(arg: NodeArg, values: Sequence[fx.Node], device: torch.device) -> Argument:
    if isinstance(arg, Ref):
        return values[arg.index]
    if isinstance(arg, tuple) and has_ref(arg):
        return [_argument(item, values, device) for item in arg]
    return constant(arg, device)
