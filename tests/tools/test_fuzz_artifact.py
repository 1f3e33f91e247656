"""Damaged programs with a right digest end with a sentence, whatever reads them, within 2 s and 1 GB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.damage import Damage
from tools.fuzz_artifact import ending, subjects


@pytest.mark.slow
def test_damaged_programs_end_with_a_sentence() -> None:
    # In a process of its own: each damaged file is read in a fork of it, which must be light.
    command = [sys.executable, "-m", "tools.fuzz_artifact", "--bodies", "100", "--edits", "100"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert made.returncode == 0, made.stdout
    rows = [line.split() for line in made.stdout.splitlines()]
    assert ["all", "bodies", "100"] in [row[:3] for row in rows]
    assert ["all", "edits", "100"] in [row[:3] for row in rows]


@pytest.mark.slow
def test_what_is_whole_is_accepted(tmp_path: Path) -> None:
    assert {ending(Damage("none", body), tmp_path).outcome for body in subjects()} == {"accepted"}
