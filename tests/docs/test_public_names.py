"""The documents use the public names alone: nothing is imported from below ``zeroir``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeroir
from tests.docs.test_docs_blocks import DOCUMENTS, blocks_of


def private_names(source: str) -> Iterator[str]:
    """The modules below ``zeroir`` that a script imports, and its uses of names that ``zeroir`` does not export."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (n.name for n in node.names if n.name.startswith("zeroir."))
            case ast.ImportFrom(module=str() as module) if module.startswith("zeroir."):
                yield module
            case ast.ImportFrom(module="zeroir"):
                yield from (n.name for n in node.names if n.name not in vars(zeroir)["__all__"])
            case ast.Attribute(value=ast.Name(id="zeroir"), attr=name):
                if name not in vars(zeroir)["__all__"]:
                    yield f"zeroir.{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_scripts_use_public_names(document: Path) -> None:
    for block in blocks_of(document.name, document.read_text("utf-8")):
        if block.language == "python":
            assert list(private_names(block.text)) == [], block.place


@pytest.mark.parametrize(
    "source",
    [
        "import zeroir.api",
        "from zeroir.frontend import entry",
        "from zeroir import artifact",
        "import zeroir\nzeroir.api.compile_model('m.py')",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_names(source))


def test_public_names_are_no_private_ones() -> None:
    assert (
        list(private_names("import zeroir\nzeroir.compile('m.py')\nfrom zeroir import plan")) == []
    )
