"""Damaged programs with a right digest end with a sentence, whatever reads them, within 2 s and 1 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.subjects import NAMES
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


# ---- The tool that judges damaged programs


@pytest.mark.slow
def test_what_was_judged_when_the_time_is_over_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "mutants.json"
    command = [sys.executable, "-m", "tools.mutants", "--program", NAMES[0], "--processes", "1"]
    command += ["--count", "20", "--seconds", "0", "--record", str(record)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[-1] == "0 of 20 mutants were tried in 0 seconds."
    assert json.loads(record.read_text())["rows"][-1] == ["all", "0", "0", "0", "0"]
