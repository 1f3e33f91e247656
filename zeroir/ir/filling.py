"""Which ops can make their result in memory that is given to them, on a CPU.

The list is generated from torch's own schemas by ``tools/list_aten_ops.py``.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from zeroir.ir.segment import Node


def can_fill(node: Node) -> bool:
    """Whether the node's one result can be made in a given tensor that has its strides."""
    if len(node.results) != 1:
        return False
    if node.op == "aten.embedding_dense_backward.default":
        return node.args[4] is False
    return node.op in _filling_ops()


@cache
def _filling_ops() -> frozenset[str]:
    text = resources.files("zeroir.ir").joinpath("filling_ops.txt").read_text("utf-8")
    found: set[str] = set()
    for line in text.splitlines():
        packet, _, overloads = line.partition(":")
        if not line.startswith("#"):
            found.update(f"{packet}.{overload}" for overload in overloads.split())
    return frozenset(found)
