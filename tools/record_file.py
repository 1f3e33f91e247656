"""The results of measuring tools: tables on the terminal, and records from which docs/performance.md is written.

A record is a JSON file; it says how it was made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table


def parser(docstring: str) -> argparse.ArgumentParser:
    """A parser for the tool of this docstring, with ``--record FILE``."""
    described = argparse.ArgumentParser(description=docstring.partition("\n")[0])
    add_option(described)
    return described


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--record FILE``, refused before anything is measured where FILE cannot be written."""
    parser.add_argument(
        "--record", type=_writable, metavar="FILE", help="write what was measured to a JSON file"
    )


def write(
    path: Path | None,
    tool: str,
    content: Mapping[str, object],
    about: Mapping[str, object] = {},
    *,
    after: Sequence[Sequence[str]] = (),
) -> None:
    """Write the results of ``python -m tools.{tool}``, with the commands and versions, if a file was given.

    ``after`` are the commands that made what the results have from earlier runs.
    """
    if path is None:
        return
    header = {
        "commands": [*after, ["python", "-m", f"tools.{tool}", *sys.argv[1:]]],
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        **about,
    }
    path.write_text(json.dumps({"about": header, **content}, indent=1) + "\n")


def commands_of(path: Path | None) -> list[list[str]]:
    """The commands that made a record; none where there is no file."""
    if path is None or not path.exists():
        return []
    commands: list[list[str]] = json.loads(path.read_text())["about"]["commands"]
    return commands


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells under a head."""
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def publish(
    path: Path | None,
    tool: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    about: Mapping[str, object] = {},
) -> None:
    """Print the results of a tool as a table, and write them; see ``write``."""
    print_table(head, rows)
    write(path, tool, {"head": head, "rows": rows}, about)


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written: give a file in a folder that can"
        )
    return path
