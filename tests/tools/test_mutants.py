"""The tool that judges damaged programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.subjects import NAMES


@pytest.mark.slow
def test_what_was_judged_when_the_time_is_over_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "mutants.json"
    command = [sys.executable, "-m", "tools.mutants", "--program", NAMES[0], "--processes", "1"]
    command += ["--count", "20", "--seconds", "0", "--record", str(record)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[-1] == "0 of 20 mutants were tried in 0 seconds."
    assert json.loads(record.read_text())["rows"][-1] == ["all", "0", "0", "0", "0"]
