"""Copies of the product with a change that ARCHITECTURE.md shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("zeroir", "passes", "runtime")
PAGE = ROOT / "ARCHITECTURE.md"


def change(heading: str) -> str:
    """The diff in a section of the page."""
    section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return str(block)


def changed_files(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)


def copy_of_the_product(folder: Path) -> Path:
    for name in (*PRODUCT, "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def apply(diff: str, product: Path, *, is_taken_out: bool = False) -> None:
    command = ["git", "apply", "-C1", *(["-R"] if is_taken_out else []), "-"]
    done = subprocess.run(
        command, input=diff, cwd=product, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"ARCHITECTURE.md's change no longer applies:\n{done.stderr}"


def run_in(product: Path, script: str) -> str:
    """What a script prints that imports the copy, and the tests of the original."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (product, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=product,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr
