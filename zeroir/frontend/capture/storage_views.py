"""Rewrite ops that depend on a tensor's storage, so that they do not depend on where a buffer begins in memory.

``as_strided`` counts from the beginning of a storage, and ``unsafe_split`` yields views but does not declare them. In
the graph of a model each storage belongs to one value; ``zeroir.strided`` counts from the first element of that value.

    aten.as_strided(view of x, size, stride, 8)    →    zeroir.strided(x, size, stride, 8)
    aten.unsafe_split(x, 2, 0)                     →    aten.split_with_sizes(x, [2, 2], 0)
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor, fx

from zeroir.ir.buffers import span_numel
from zeroir.torch_ops.strided import strided, strided_scatter

aten = torch.ops.aten

_VIEWS = (aten.as_strided.default, aten._reshape_alias.default)
_SPLITS = (
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)


def rewrite_storage_views(graph: fx.Graph) -> None:
    """Rewrite a traced graph in place; the metadata of its nodes has the tracer's fake tensors."""
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            _rewrite_view(node)
        elif node.target is aten.as_strided_copy.default:
            _rewrite_copy(graph, node)
        elif node.target is aten.as_strided_scatter.default:
            _rewrite_scatter(node)
        elif node.target in _SPLITS:
            _rewrite_split(node)


def bounds_error(node: fx.Node) -> str | None:
    """Return by how much a rewritten view exceeds its tensor, as the end of a sentence; None if it does not.

    Fake tensors have no memory, so the tracer does not check it.
    """
    if node.target is not strided:
        return None
    root, *numbers = fx.map_arg(node.args, lambda arg: arg.meta["val"])
    size, stride, start = cast("tuple[list[int], list[int], int]", numbers)
    tensor = cast("Tensor", root)
    extent = span_numel(tuple(tensor.shape), tensor.stride())
    span = span_numel(tuple(size), tuple(stride))
    if span == 0 or 0 <= start <= extent - span:
        return None
    return f"sees {start + span} elements of {extent}" if start >= 0 else f"begins at {start}"


def _rewrite_view(node: fx.Node) -> None:
    source, size, stride, *_ = node.args
    root = _root(cast("fx.Node", source))
    start = _offset(node) - _offset(root)
    node.target, node.args, node.kwargs = strided, (root, size, stride, start), {}


def _rewrite_copy(graph: fx.Graph, node: fx.Node) -> None:
    source, size, stride, *offsets = node.args
    viewed = cast("fx.Node", source)
    start = node.kwargs.get("storage_offset", offsets[0] if offsets else None)
    with graph.inserting_before(node):
        view = graph.call_function(strided, (source, size, stride))
    tensor = cast("Tensor", viewed.meta["val"])
    first = _offset(viewed) if start is None else start
    view.meta = {**node.meta, "val": tensor.as_strided(size, stride, first)}  # type: ignore[arg-type]
    _rewrite_view(view)
    node.target, node.args = aten.clone.default, (view,)
    node.kwargs = {"memory_format": torch.contiguous_format}


def _rewrite_scatter(node: fx.Node) -> None:
    x, source, size, stride, *offsets = node.args
    start = cast("int | None", node.kwargs.get("storage_offset", offsets[0] if offsets else None))
    first = _offset(cast("fx.Node", x))
    offset = 0 if start is None else start - first
    node.target, node.args, node.kwargs = strided_scatter, (x, source, size, stride, offset), {}


def _rewrite_split(node: fx.Node) -> None:
    x, _, *dims = node.args
    dim = cast("int", node.kwargs.get("dim", dims[0] if dims else 0))
    sizes = [part.shape[dim] for part in cast("list[Tensor]", node.meta["val"])]
    node.target, node.args, node.kwargs = aten.split_with_sizes.default, (x, sizes, dim), {}


def _root(node: fx.Node) -> fx.Node:
    """Return the value that owns the storage of a node's value."""
    while node.op == "call_function":
        (maker, *_) = node.all_input_nodes if node.target is operator.getitem else (node,)
        if not _is_view(maker):
            return node
        node = cast("fx.Node", maker.args[0])
    return node


def _is_view(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op.is_view and op is not aten.view.dtype


def _offset(node: fx.Node) -> int:
    return int(cast("Tensor", node.meta["val"]).storage_offset())
