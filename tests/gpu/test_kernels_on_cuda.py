"""Segments compiled for a CUDA device: kept on disk, loaded without the compiler, in agreement with eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.support import (
    SEED,
    TOLERANCE,
    example,
    example_batches,
    example_file,
    losses_of,
    waiting_is_an_error,
)
from tests.runtime.support import initial_flats, lowered
from tests.support.programs import mlp
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels.choice import KernelBackend

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_example_agrees_with_eager_kernels(
    device: torch.device, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: from nothing, and from what the first time left. Eager kernels taking over would warn and fail."""
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    found: list[torch.Tensor] = []
    kept: list[dict[str, int]] = []
    for kernels in (KernelBackend.EAGER, KernelBackend.INDUCTOR, KernelBackend.INDUCTOR):
        engine = Engine(
            example(3, 1, precision), EngineSettings(kernels=kernels, seed=SEED), device=device
        )
        engine.initialise(example_file().model, SEED)
        found.append(losses_of(engine, example_batches()))
        engine.close()
        kept.append({str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("kernel.so")})
    for losses in found[1:]:
        torch.testing.assert_close(losses, found[0], rtol=TOLERANCE[precision], atol=0.0)
    assert kept[1]
    assert kept[1] == kept[2]


@pytest.mark.parametrize("kernels", KernelBackend)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_kernel_passes_its_check_before_training(
    device: torch.device, kernels: KernelBackend, precision: str
) -> None:
    program = example(3, 1, precision)
    Engine(
        program, EngineSettings(kernels=kernels, seed=SEED, self_check=True), device=device
    ).close()


def test_compiled_kernels_wait_for_the_device_nowhere(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    program = lowered(mlp(), 3, 1)
    engine = Engine(program, EngineSettings(kernels=KernelBackend.INDUCTOR), device=device)
    engine.initialise_flats(initial_flats(program))
    first, second = ({"x": torch.randn(4, 6, device=device)} for _ in range(2))
    engine.step(first)
    with waiting_is_an_error():
        result = engine.step(second)
    assert result.loss == result.loss
    engine.close()
