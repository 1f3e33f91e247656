"""What Inductor compiles for a GPU computes what the eager kernels do, on a device that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.runtime.support import ROOT
from tests.support.absent_cuda import PACKAGES

MODELS = ROOT / "tests" / "support" / "models"


def judged(
    folder: Path, model: Path, options: Mapping[str, object], architectures: list[int]
) -> list[dict[str, object]]:
    """What ``judge`` finds of each segment of a model."""
    request = {
        "folder": str(folder),
        "model": str(model),
        "options": options,
        "architectures": architectures,
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.absent_cuda.judge", json.dumps(request)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Only private interfaces of torch's compile for a device that is not there.
    assert result.returncode == 0, f"torch {torch.__version__}: {result.stderr}"
    found: list[dict[str, object]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make setup` installs Triton")
def test_code_for_a_gpu_computes_what_eager_kernels_do(tmp_path: Path) -> None:
    """Losses are at addresses that are not aligned, as those of several micro-batches are.

    Attention is an operator of zeroir's, which no segment needs AOTInductor's container to call.
    """
    found = judged(tmp_path, MODELS / "llama.py", {"precision": "bf16"}, [90])
    assert len(found) >= 4
    assert [segment for segment in found if segment["differences"]] == []
    assert sum(bool(segment["launched"]) for segment in found) >= 4
    assert {segment["library"] for segment in found} == {"_SegmentFunction"}
    assert any(segment["unaligned"] for segment in found)
