"""Records of measured runs: JSON files from which docs/performance.md is written, each with how it was made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--record FILE``, refused before anything is measured where FILE cannot be written."""
    parser.add_argument(
        "--record", type=_writable, metavar="FILE", help="write what was measured to a JSON file"
    )


def write(
    path: Path | None, tool: str, content: Mapping[str, object], about: Mapping[str, object] = {}
) -> None:
    """Write the results of ``python -m tools.{tool}``, with the command and versions, if a file was given."""
    if path is None:
        return
    header = {
        "command": ["python", "-m", f"tools.{tool}", *sys.argv[1:]],
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        **about,
    }
    path.write_text(json.dumps({"about": header, **content}, indent=1) + "\n")


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written: give a file in a folder that can"
        )
    return path
