"""The lists of torch's ops that stand beside the IR, as ``tools/list_aten_ops.py`` generates them."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def listed_ops(file: str) -> frozenset[str]:
    """The full names, such as ``aten.mm.default``, in a list of this package: lines of ``namespace.op: overloads``."""
    text = resources.files("zeroir.ir.segments").joinpath(file).read_text("utf-8")
    names: set[str] = set()
    for line in text.splitlines():
        packet, _, overloads = line.partition(":")
        if not line.startswith("#"):
            names.update(f"{packet}.{overload}" for overload in overloads.split())
    return frozenset(names)
