"""The parsed text of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def nodes(path: Path) -> Iterator[ast.AST]:
    """Yield the nodes of a file; millions of them that stay would slow down each collection of garbage."""
    return ast.walk(ast.parse(path.read_text("utf-8")))
