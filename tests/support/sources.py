"""The parsed text of files, once a process: parsing the product takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file, as ``ast.walk`` yields them."""
    return _nodes(path.resolve())


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))
