"""Equal input makes equal bytes, whatever order Python's sets have in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = "tests/support/models"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (f"{MODELS}/convnet.py", "--stage", "3", "--recompute", "*"),
        (f"{MODELS}/traps.py", "--stage", "2", "--precision", "fp16", "--micro-steps", "2"),
        ("examples/gpt.py", "--mesh", "replicate=2,shard=2", "--bucket", "1000000"),
    ],
    ids=["recompute", "micro-steps", "hybrid"],
)
def test_the_hash_seed_changes_no_byte(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ranks = () if "--mesh" in arguments else ("--world-size", "4")
    programs = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.zir"
        subprocess.run(
            [sys.executable, "-m", "zeroir", "compile", *arguments, *ranks, "-o", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        programs.append(path.read_bytes())
    assert programs[0] == programs[1]
