"""The comparison on a GPU: what it says without one, and the arithmetic behind its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zeroir
from tools import bench_gpu
from tools.bench_gpu import BenchWorld
from tools.peers import gpu_gpt
from zeroir.runtime.engine.engine import Engine

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 64, 4, 32, 2


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_gpt.VARIABLE, f"{LAYERS}x{WIDTH}x{HEADS}x{LENGTH}x{BATCH}")


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    command = [sys.executable, "-W", "error", "-m", "tools.bench_gpu", "--nccl-ranks", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.startswith(b"There is no CUDA device here")
    assert found.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_its_flops_are_those_of_matrix_products_and_attention() -> None:
    """The model trains, and its program counts two FLOPs a multiply and three products a weight."""
    compiled = zeroir.compile(gpu_gpt.__file__, stage=3, world_size=1, precision="bf16")
    logical = compiled.artifact.logical
    tokens = LENGTH * BATCH
    in_products = LAYERS * 12 * WIDTH**2 + WIDTH * gpu_gpt.VOCABULARY
    scores = LAYERS * BATCH * LENGTH**2 * WIDTH  # multiplies of one product over all heads
    # Attention is two products forward and five backward, of which torch counts the scores' again.
    assert bench_gpu.step_flops(logical) == 6 * in_products * tokens + 2 * (2 + 5) * scores
    assert logical.parameters_numel == sum(p.numel() for p in gpu_gpt.model().parameters())
    engine = Engine(compiled.program)
    engine.initialise(gpu_gpt.model, 0)
    loss = engine.step(gpu_gpt.batch()).loss
    engine.close()
    assert loss == pytest.approx(torch.log(torch.tensor(gpu_gpt.VOCABULARY)).item(), rel=0.05)


def test_a_card_is_known_by_the_longest_name_in_its_devices() -> None:
    for name, peak in {
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756.5e12,
        "NVIDIA H200": 989.5e12,
        "NVIDIA H200 NVL": 835.5e12,
        "NVIDIA L40S": 362.05e12,
        "NVIDIA L4": 121e12,
        "Tesla T4": None,
    }.items():
        assert bench_gpu.peak_flops(name) == peak


def test_only_ranks_that_share_a_gpu_change_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    assert bench_gpu.environment(BenchWorld(size=64, is_real=False)) == {}
    assert bench_gpu.environment(BenchWorld(size=2, is_real=True)) == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "4",
    }
