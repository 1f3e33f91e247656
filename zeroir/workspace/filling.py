"""Which ops can make their result in memory that is given to them, on a CPU.

The list is generated from torch's own schemas by ``tools/list_aten_ops.py``.
"""

from __future__ import annotations

from zeroir.ir.op_lists import listed_ops
from zeroir.ir.segment import Node


def can_fill(node: Node) -> bool:
    """Whether the node's one result can be made in a given tensor that has its strides."""
    if len(node.results) != 1:
        return False
    if node.op == "aten.embedding_dense_backward.default":
        return node.args[4] is False
    return node.op in listed_ops("filling_ops.txt")
