"""The joint graph of one call sequence: the nodes that every call of an equal block adds to the model's joint graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.frontend._torch_private import (
    FunctionGraph,
    annotated,
    function_graph,
    is_backward,
    is_gradient_sum,
    operators_of_trace,
    whole_where_different,
)
from zeroir.frontend._torch_sizes import has_dims, torch_sizes
from zeroir.frontend.capture.blocks.calls import (
    CallSequence,
    TensorKind,
    UnrecordableError,
    kind_of,
)
from zeroir.frontend.capture.storage_views import bounds_error
from zeroir.ir.buffers import span_numel
from zeroir.torch_ops.neutral import NeutralOps

aten = torch.ops.aten


@dataclass(slots=True, kw_only=True, eq=False)
class BlockGraph:
    """Forward and backward of a call sequence, traced once.

    The graph's inputs are the sequence's external tensors and the seeds; ``seeds`` maps the nodes that take the seed of
    a dropout to the number of that dropout. ``nodes`` are the graph's operators, and ``is_backward`` marks those of the
    backward; the annotation of each is the index of its call in the sequence. ``tangents`` are the kinds of the
    outputs' gradients that the backward takes, ``gradients`` the kinds of the gradients that it returns for the
    external tensors; None if there is no gradient. ``is_sum`` says which of those are sums.
    """

    sequence: CallSequence
    graph: FunctionGraph
    nodes: tuple[fx.Node, ...]
    is_backward: dict[fx.Node, bool]
    outputs: tuple[fx.Node, ...]
    seeds: dict[fx.Node, int]
    tangents: tuple[TensorKind | None, ...]
    gradients: tuple[TensorKind | None, ...]
    is_sum: tuple[bool, ...]


def make_block_graph(sequence: CallSequence, mode: FakeTensorMode) -> BlockGraph:
    """Trace a call sequence.

    Raises:
        UnrecordableError: if the traced calls differ from the sequence.
        Exception: any exception that torch raises for calls that it cannot trace alone, such as a change of a leaf.
    """
    with mode:
        inputs = [_fake_tensor(kind, mode) for kind in sequence.inputs]
        inputs.append(torch.empty(max(sequence.sites, 1), dtype=torch.int64))
    module = _SequenceModule(sequence)
    graph = function_graph(mode, module, inputs)
    if module.sites != sequence.sites:
        raise UnrecordableError("another number of dropouts")
    seeds = {
        node: int(str(node.args[2]))
        for node in graph.inputs[-1].users
        if node.target is aten.slice.Tensor
    }
    if len(seeds) != len(graph.inputs[-1].users):
        raise UnrecordableError("another use of the seeds than dropout's")
    nodes = tuple(node for node in graph.module.graph.nodes if node.op == "call_function")
    if any(bounds_error(node) is not None for node in nodes):
        raise UnrecordableError("a strided view of more memory than the block's tensor has")
    return BlockGraph(
        sequence=sequence,
        graph=graph,
        nodes=nodes,
        is_backward={node: is_backward(_operator_of(node)) for node in nodes},
        outputs=tuple(_cloned(node) for node in graph.outputs),
        seeds=seeds,
        tangents=tuple(_kind(node) for node in graph.tangents),
        gradients=tuple(_kind(node) for node in graph.gradients[:-1]),
        is_sum=tuple(_is_sum(node) for node in graph.gradients[:-1]),
    )


class _SequenceModule(nn.Module):
    """A call sequence as a function of its external tensors and the seeds; it returns copies of its outputs."""

    def __init__(self, sequence: CallSequence) -> None:
        super().__init__()
        self.sites = 0
        self._sequence = sequence
        self._at = 0

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        sequence = self._sequence
        values = {-1 - at: tensor for at, tensor in enumerate(inputs)}
        mode = NeutralOps(
            inputs[-1],
            lambda function: annotated(whole_where_different(function), lambda: self._at),
        )
        with operators_of_trace(has_dims(inputs)), mode:
            for self._at, call in enumerate(sequence.calls):
                call.repeat(values, sequence.results)
        self.sites = mode.sites
        outputs = tuple(values[index].clone() for index in sequence.outputs)
        if [kind_of(x) for x in outputs] != [sequence.results[i] for i in sequence.outputs]:
            raise UnrecordableError("an output with gaps")
        return outputs


def _fake_tensor(kind: TensorKind, mode: FakeTensorMode) -> Tensor:
    span = kind.offset + span_numel(kind.shape, kind.stride)
    memory = torch.empty(torch_sizes((span,), mode), dtype=kind.dtype)
    (offset,) = torch_sizes((kind.offset,), mode)
    shape, stride = torch_sizes(kind.shape, mode), torch_sizes(kind.stride, mode)
    tensor = memory.as_strided(shape, stride, offset)
    return tensor.requires_grad_(kind.requires_grad)


def _operator_of(node: fx.Node) -> fx.Node:
    """Return the node itself; for one of several results, the node that computes them."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _cloned(node: fx.Node) -> fx.Node:
    """Return the node that an output is a copy of."""
    if node.target is not aten.clone.default:
        raise UnrecordableError("an output that is not a copy")
    (source,) = node.all_input_nodes
    return source


def _kind(node: fx.Node | None) -> TensorKind | None:
    return None if node is None else kind_of(node.meta["val"])


def _is_sum(node: fx.Node | None) -> bool:
    while node is not None and node.target in (aten.alias.default, aten.detach.default):
        (node,) = node.all_input_nodes
    return node is not None and is_gradient_sum(node)
