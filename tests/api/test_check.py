"""`check` compares bit for bit: clipped training, whose norm the replicas take from the program, and losses in FP64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.captures import ROOT
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.runtime.execution import numerics


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_bits", [32, 8])
def test_the_rounding_of_a_norm_makes_no_difference(optimizer_bits: int) -> None:
    """With this seed the FP32 norm is rounded otherwise than the sum of all squares, and Adam would amplify it."""
    options = make_options({"world_size": 2, "clip": 1.0, "optimizer_bits": optimizer_bits})
    comparison = check_model(str(ROOT / "examples" / "gpt.py"), options, steps=2, seed=1)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0
    assert "bit for bit, and the norms that clip gradients within 7.6e-06" in str(comparison)


@pytest.mark.slow
def test_a_wrong_norm_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.sum_of_squares

    def wrong(sources: Sequence[Tensor], destination: Tensor, *, is_added: bool = False) -> None:
        right(sources, destination, is_added=is_added)
        destination.mul_(1.0001)

    monkeypatch.setattr(numerics, "sum_of_squares", wrong)
    model = str(ROOT / "tests" / "support" / "models" / "two_blocks.py")
    comparison = check_model(model, make_options({"world_size": 2, "clip": 0.1}), steps=1, seed=0)
    assert [difference.what for difference in comparison.differences] == [
        "the norm of the gradients"
    ]


DOUBLE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).double().square().mean()

def model():
    return Model()

def batch():
    return (torch.randn(2, 4),)

def eval_batches(rank, world_size, seed):
    yield batch()
"""


@pytest.mark.slow
def test_a_loss_in_fp64_is_rounded_to_fp32_in_evaluations_too(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(DOUBLE)
    comparison = check_model(
        str(tmp_path / "double.py"), make_options({"world_size": 2}), steps=1, seed=0
    )
    assert comparison.is_equal, str(comparison)
