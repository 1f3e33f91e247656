"""Ops of our own that are bitwise equal to a few of ATen's ops: another way to compute the same value."""

from __future__ import annotations

from typing import Final

from zeroir.ir.segments.segment import Node, NodeArg, Ref, TensorType

DROPOUT: Final = "zeroir.dropout.default"


def dropout_applied(node: Node, mask: NodeArg, product: Ref) -> tuple[Node, Node] | None:
    """Return the first result of a dropout, ``x * mask * 1 / (1 - p)``, as two nodes; None for any other node.

    ``mask`` refers to the dropout's second result and ``product`` to that of the first of the two nodes.
    """
    if node.op != DROPOUT or len(node.args) != 3 or node.kwargs:
        return None
    x, p, _ = node.args
    kind = node.results[0]
    if not isinstance(p, int | float) or kind is None:
        return None
    scale = 0.0 if p >= 1 else 1 / (1 - p)
    return (
        _product(x, mask, kind, node.source),
        _product(product, scale, kind, node.source),
    )


def _product(left: NodeArg, right: NodeArg, kind: TensorType, source: str) -> Node:
    return Node(op="aten.mul.Tensor", args=(left, right), results=(kind,), source=source)
