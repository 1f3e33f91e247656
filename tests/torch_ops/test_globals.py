"""Torch's global settings are restored after the user's code, also where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroir
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.torch_ops.globals import torch_globals_kept

CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "generator": (lambda: torch.manual_seed(5), lambda: torch.get_rng_state().tolist()),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "newer products": (
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        lambda: [
            attrgetter(f"{owner}fp32_precision")(torch.backends)
            for owner in ("", "cuda.matmul.", "cudnn.rnn.", "mkldnn.conv.")
        ],
    ),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
}

MODEL = """
import torch
from torch import nn

torch.set_default_dtype(torch.float64)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        {forward}

def model():
    torch.set_default_device("meta")
    torch.manual_seed(3)
    return Model()

def batch():
    torch.set_grad_enabled(False)
    torch.manual_seed(3)
    return (torch.ones(3, 4, dtype=torch.float32),)
"""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the globals, so that a failing test does not affect the next."""
    with torch_globals_kept():
        yield


@pytest.mark.parametrize("name", CHANGES)
def test_a_global_is_restored_after_an_exception(name: str) -> None:
    change, read = CHANGES[name]
    before = read()
    with pytest.raises(ZeroDivisionError), torch_globals_kept():  # noqa: PT012
        change()
        assert read() != before
        raise ZeroDivisionError
    assert read() == before


def test_globals_that_torch_refuses_to_read_raise_no_error() -> None:
    """torch refuses to read the precision where its two interfaces were set to different values."""
    backends: Any = torch.backends
    backends.cudnn.rnn.fp32_precision = "ieee"
    backends.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with torch_globals_kept():
        backends.cuda.matmul.fp32_precision = "ieee"
    assert backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("forward", ["return self.layer(x).mean()", "raise ValueError('wrong')"])
def test_compile_and_check_leave_globals_unchanged(forward: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("{forward}", forward))
    before = {name: read() for name, (_, read) in CHANGES.items()}
    fails = "raise" in forward
    for work in (
        lambda: zeroir.compile(path, world_size=1),
        lambda: check_model(str(path), make_options({"world_size": 1}), steps=1, seed=0),
    ):
        try:
            work()
        except UserError:
            assert fails
        assert {name: read() for name, (_, read) in CHANGES.items()} == before
