"""Ranks whose batches all have other sizes compute what eager PyTorch computes, and compile nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zygote import run_forked
from tools.random_shapes import TRAININGS, Outcome, outcome

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.parametrize("name", TRAININGS)
def test_random_shapes_compile_nothing_and_have_the_bits_of_eager_pytorch(
    tmp_path: Path, name: str
) -> None:
    found = outcome(TRAININGS[name], 12, tmp_path, timeout_s=200, ranks=3)
    assert found == Outcome(steps=12, shapes=found.shapes)
    assert found.shapes > 12


def test_what_compiles_is_noticed(tmp_path: Path) -> None:
    script = """
import subprocess
from tests.support.zygote import run_forked
from tools.random_shapes import note_compilations
events = []
note_compilations(events)
eval("1 + 1")
subprocess.run(["true"])
assert len(events) == 2, events
"""
    (tmp_path / "script.py").write_text(script)
    done = run_forked("script.py", (), tmp_path)
    assert done.returncode == 0, done.stderr
