"""The messages on the page of troubleshooting are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.sources import nodes

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<message>[^|]+?)`(?P<origin> \([^)|]*\))? \| .+ \|$", re.MULTILINE)
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
MESSAGES = [row["message"] for row in ROW.finditer(PAGE) if row["origin"] is None]


@cache
def templates() -> frozenset[str]:
    """Every text in the sources, with an ellipsis for what it fills in."""
    folders = [ROOT / "passes", ROOT / "runtime", *(ROOT / "zeroir").iterdir()]
    files = [
        path for folder in folders for path in (*folder.rglob("*.py"), folder) if path.is_file()
    ]
    python = [path for path in files if path.suffix == ".py"]
    return frozenset(text for path in python for text in texts(path))


def texts(path: Path) -> Iterator[str]:
    for node in nodes(path):
        match node:
            case ast.Constant(value=str() as text):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(
                    part.value
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    else "…"
                    for part in parts
                )


def is_in_the_code(message: str) -> bool:
    return any(message in template for template in templates())


def test_every_row_is_read() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(ROW.finditer(PAGE)))


def test_messages_are_those_of_the_code() -> None:
    assert [message for message in MESSAGES if not is_in_the_code(message)] == []


def test_a_message_that_was_reworded_is_found() -> None:
    assert not is_in_the_code("batches() stopped before step …")
