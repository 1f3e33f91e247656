"""Equal input makes equal bytes, whatever order Python's sets have in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = "tests/support/models"
PROGRAMS = {
    "recompute": (f"{MODELS}/convnet.py", "--stage=3", "--recompute=*", "--world-size=4"),
    "micro-steps": (
        *(f"{MODELS}/traps.py", "--stage=2", "--precision=fp16"),
        *("--micro-steps=2", "--world-size=4"),
    ),
    "hybrid": ("examples/gpt.py", "--mesh=replicate=2,shard=2", "--bucket=1000000"),
}
COMPILING = f"""
import sys
from zeroir.cli.app import run_command
for name, arguments in {PROGRAMS!r}.items():
    assert run_command(["compile", *arguments, "-o", f"{{sys.argv[1]}}/{{name}}.zir"]) == 0
"""


@pytest.mark.slow
def test_the_hash_seed_changes_no_byte(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-c", COMPILING, str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    for name in PROGRAMS:
        first, second = ((tmp_path / seed / f"{name}.zir").read_bytes() for seed in ("1", "2"))
        assert first == second, name
