"""What is told apart as a library's scratch memory, and that what is declared holds whatever a CPU can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from tests.memory.library import without_scratch
from tests.support.allocations import left_bytes
from zeroir.runtime.memory.allocations import allocations, peak_bytes

ROOT = Path(__file__).parents[2]


def test_only_what_one_call_takes_and_gives_back_is_its_scratch_memory() -> None:
    kept: list[Tensor] = []

    def action() -> None:
        with record_function("library"):
            torch.empty(1000)
            kept.append(torch.empty(10))
        with record_function("library"):
            kept.clear()
            kept.append(torch.empty(20))
        with record_function("kernel"):
            torch.empty(30)

    events = allocations(action)
    assert peak_bytes(events) == 4000
    own = without_scratch(events, {"library"})
    assert [event.size_bytes for event in own] == [40, -40, 80, 120, -120]
    assert left_bytes(events) == left_bytes(own) == 80


@pytest.mark.slow
@pytest.mark.parametrize("most", ["AVX2", "AVX512_CORE"])
def test_what_is_declared_holds_whatever_onednn_may_use(most: str) -> None:
    """A process of its own, for oneDNN reads the variable once; on other CPUs than those of x86 it means nothing."""
    files = ["tests/memory/test_scratch.py", "tests/memory/test_steps.py"]
    chosen = "products or convolutions or attention or small_step"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": most, "ZEROIR_TEST_EXAMPLES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
