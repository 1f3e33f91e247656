"""`check` compares clipped training bit for bit: it clips the replicas by the norm of the program, and compares it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from tests.support.captures import ROOT
from zeroir.api.check import check_model
from zeroir.config import make_options
from zeroir.runtime import numerics


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
