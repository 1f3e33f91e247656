"""A program that was captured for another device than the one of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()
def model():
    return Net()
def batch():
    return torch.ones(3, 8)
"""


@pytest.mark.slow
def test_a_run_compiles_a_program_for_another_device_again(zeroir: Zeroir, tmp_path: Path) -> None:
    path, program = tmp_path / "model.py", tmp_path / "model.zir"
    path.write_text(MODEL)
    options = ("--precision", "bf16", "--world-size", "1", "--no-select-saved", "--device", "cuda")
    answer = zeroir("compile", path, *options, "-o", program)
    assert answer.exit_code == 0, answer.err
    assert "captured for cuda" in answer.out
    answer = zeroir("run", program, "--model", path, "--steps", "1")
    assert answer.exit_code == 0, answer.err
    assert "captured for CUDA and is compiled again for this run" in answer.err
    assert "loss" in answer.out + answer.err
