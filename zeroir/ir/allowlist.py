"""The ops that a segment may name: pure ones of ATen and prims, and our own.

A program may come from anywhere, and running it calls torch ops by name. So a segment may name only ops that do
nothing but compute. The list is generated from the schemas of torch and of our own ops by ``tools/list_aten_ops.py``.
"""

from __future__ import annotations

import re

from zeroir.ir.op_lists import listed_ops

_MUTATING = re.compile(r"(aten|prims)\.([A-Za-z0-9_]*[A-Za-z0-9]_|__i[a-z]+__)\.[A-Za-z0-9_]+")


def is_allowed(op: str) -> bool:
    """Whether a segment may name the op, such as ``aten.mm.default``."""
    return op in allowed_ops()


def refusal(op: str) -> str | None:
    """Why a segment may not name the op, to be read after its name; None where it may."""
    if is_allowed(op):
        return None
    if _MUTATING.fullmatch(op):
        return "changes its argument, while segments are pure"
    return "is not on the list of pure ops (ATen's functional ones and zeroir's own)"


def allowed_ops() -> frozenset[str]:
    """The full names of the ops that a segment may name."""
    return listed_ops("aten_ops.txt")
