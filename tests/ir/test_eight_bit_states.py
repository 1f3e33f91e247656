"""The map of 8-bit codes: the published values, each once, and zero for padding."""

from __future__ import annotations

import pytest
import torch

from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel, code_values
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.forms import ABSMAX, CODES, is_signed
from zeroir.ir.own_coordinates import OWN_COORDINATES


def published(*, signed: bool) -> list[float]:
    """The dynamic map of the paper (arXiv 2110.02861) in the order of values, in FP32 as bitsandbytes computes it."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1)
        centres = 10 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
        values += centres.tolist()
        values += (-centres).tolist() if signed else []
    return sorted(values)


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_the_published_ones(signed: bool) -> None:
    values = code_values(signed=signed)
    assert len(set(values)) == len(values) == 256
    # linspace rounds in FP32.
    assert sorted(values) == pytest.approx(published(signed=signed), rel=1e-6, abs=0)


@pytest.mark.parametrize("signed", [True, False])
def test_code_0_is_zero_and_each_code_is_above_the_one_before(signed: bool) -> None:
    values = code_values(signed=signed)
    assert values[0] == 0.0
    assert max(values) == 1.0
    first_negative = next((i for i, value in enumerate(values) if value < 0), 256)
    assert first_negative == (129 if signed else 256)
    assert list(values[:first_negative]) == sorted(values[:first_negative])
    assert list(values[first_negative:]) == sorted(values[first_negative:])
    assert min(values) == (pytest.approx(-0.99296875) if signed else 0.0)


def test_every_state_that_can_be_coded_has_names() -> None:
    names = {name for a in Algorithm if a.has_states_of_elements for name in a.state_names}
    assert names == set(CODES) == set(ABSMAX)
    assert set(ABSMAX.values()) <= set(OWN_COORDINATES)
    assert [name for name in names if not is_signed(name)] == ["exp_avg_sq"]


def test_the_last_block_may_be_partly_padding() -> None:
    counts = [blocks_numel(n) for n in (0, 1, BLOCK_NUMEL, BLOCK_NUMEL + 1)]
    assert counts == [0, 1, 1, 2]
