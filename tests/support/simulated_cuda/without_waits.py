"""``CudaStreams`` without one of the statements by which it orders streams, threads and the host."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

from zeroir.runtime.execution import cuda
from zeroir.runtime.execution.cuda import CudaStreams

_ORDERING = (
    "wait_event",
    "synchronize",
    "join",
    "call",
    "wait",
    "_order",
    "wait_for_thread",
    "wait_for_threads",
)
_SOURCE = Path(cuda.__file__)


def _statements(tree: ast.Module) -> list[ast.Expr]:
    """The statements of the class that wait, or let a stream or a thread wait."""
    found: list[ast.Expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if isinstance(function, ast.Call):  # a wait that is made and called at once
                name = "wait"
            if name in _ORDERING:
                found.append(node)
    return sorted(found, key=lambda node: node.lineno)


def waits() -> dict[str, int]:
    """Each statement, as its text and the number of those with the same text before it, and its place in the order."""
    found: dict[str, int] = {}
    for index, node in enumerate(_statements(ast.parse(_SOURCE.read_text()))):
        text = ast.unparse(node)
        same = sum(name.rsplit(" #", 1)[0] == text for name in found)
        found[f"{text} #{same}"] = index
    return found


def without(index: int) -> type[CudaStreams]:
    """The class without the statement of that place."""
    tree = ast.parse(_SOURCE.read_text())
    removed = _statements(tree)[index]
    removed.value = ast.copy_location(ast.Constant(None), removed.value)
    module = ModuleType(cuda.__name__)
    module.__file__ = str(_SOURCE)
    exec(compile(tree, str(_SOURCE), "exec"), module.__dict__)
    made: type[CudaStreams] = module.CudaStreams
    return made
