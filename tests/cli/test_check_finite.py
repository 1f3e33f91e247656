"""``zeroir run --check-finite`` ends before an update that would spoil the parameters, and names where it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)

    def forward(self, x, y):
        return self.first(y).square().mean() + self.second(x).square().sum(1).sqrt().mean()

def model():
    return Net()

def batch():
    return torch.ones(2, 3), torch.ones(2, 3)

def batches(rank, world_size, seed, start_step=0):
    yield batch()
    yield torch.zeros(2, 3), torch.ones(2, 3)
    yield batch()
"""


@pytest.mark.slow
def test_a_run_names_the_first_parameter_without_a_finite_gradient(
    zeroir: Zeroir, tmp_path: Path
) -> None:
    path, program = tmp_path / "model.py", tmp_path / "model.zir"
    path.write_text(MODEL)
    answer = zeroir("compile", path, "--world-size", "1", "-o", program)
    assert answer.exit_code == 0, answer.err
    run = ("run", program, "--model", path, "--steps", "3")
    assert_refused(
        zeroir(*run, "--check-finite"),
        "The loss is finite at step 2",
        "'second.weight' of the unit root",
    )
    # Without it, the next loss shows that something was wrong.
    assert_refused(zeroir(*run), "The loss is nan at step 3", "--check-finite")
