"""Norms, overflow, the decision and the loss scale against plain arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.ir.ops import Refill
from zeroir.runtime.execution import numerics
from zeroir.runtime.memory.allocations import allocations, peak_bytes
from zeroir.workspace.op_scratch import CONVERTED_CHUNK_NUMEL

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@examples(200)
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 5),
    factor=st.sampled_from([1.5, 2.0, 4.0]),
    hysteresis=st.integers(1, 3),
    minimum=st.sampled_from([0.25, 1.0, 8.0]),
    refill=st.sampled_from(Refill),
)
def test_the_loss_scale_moves_as_deepspeed_has_it(
    overflows: list[bool],
    window: int,
    factor: float,
    hysteresis: int,
    minimum: float,
    refill: Refill,
) -> None:
    """The rule written with iteration numbers, as DeepSpeed's DynamicLossScaler states it."""
    scale, left, last_overflow = 8.0, hysteresis, -1
    state = torch.tensor([scale, 0.0, float(hysteresis)])
    for iteration, is_overflow in enumerate(overflows):
        if is_overflow:
            if left == 1:
                scale = max(scale / factor, minimum)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if refill is Refill.STEP:
                left = hysteresis
            if (iteration - last_overflow) % window == 0:
                left = hysteresis
                scale *= factor
        numerics.update_scale(
            state,
            torch.tensor([float(is_overflow)]),
            window=window,
            factor=factor,
            hysteresis=hysteresis,
            minimum=minimum,
            refill=refill,
        )
        assert state[0] == torch.tensor(scale)
        assert state[2] == left
        scale = float(state[0])  # the device computes in FP32


def test_a_step_without_data_is_no_overflow() -> None:
    state, skip = torch.tensor([8.0, 1.0, 1.0]), torch.ones(1)
    for weight, expected in ((0.0, [8.0, 1.0, 1.0]), (3.0, [4.0, 0.0, 1.0])):
        numerics.update_scale(
            state,
            skip,
            window=2,
            factor=2.0,
            hysteresis=1,
            minimum=1.0,
            weight=torch.tensor([weight]),
        )
        assert state.tolist() == expected


def test_a_factor_of_zero_clears_what_is_not_finite() -> None:
    values = torch.tensor([1.0, math.nan, math.inf])
    numerics.scale(values, torch.tensor([2.0]))
    assert values[0] == 2.0
    assert values[1].isnan()
    numerics.scale(values, torch.tensor([0.0]))
    assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (6e4, 0.0)],
)
def test_one_bad_element_is_an_overflow(dtype: torch.dtype, value: float, expected: float) -> None:
    sources = [torch.ones(300, dtype=dtype), torch.ones(100, dtype=dtype)]
    sources[1][77] = value
    found = torch.full((1,), 9.0)
    numerics.has_overflow(sources, found)
    assert found.item() == expected


def test_the_norm_adds_every_source() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(3 * 2**20 + 5, generator=generator),
        torch.randn(7, generator=generator).half(),
    ]
    found = torch.zeros(1)
    numerics.sum_of_squares(sources, found)
    expected = sum(float(source.double().square().sum()) for source in sources)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_clipping_follows_torch() -> None:
    """The divisor is what torch.nn.utils.clip_grad_norm_ would have done to the averaged, unscaled gradient."""
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(3))
    parameter = torch.zeros(100, requires_grad=True)
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    scaled = gradient * 6 * 1024  # summed over 6 contributions, scaled by 1024
    divisor, step = torch.zeros(1), torch.zeros(1)
    numerics.decide(
        steps=[step],
        gradient_divisor=divisor,
        divisor=6,
        overflow=None,
        norm=scaled.square().sum().view(1),
        loss_scale=torch.tensor([1024.0, 0.0, 2.0]),
        skip=None,
        max_norm=0.5,
    )
    torch.testing.assert_close(scaled / divisor, parameter.grad)
    assert step.item() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("source", "destination"), list(itertools.permutations(DTYPES, 2)))
def test_adding_in_another_dtype_takes_a_piece_at_a_time(
    source: torch.dtype, destination: torch.dtype
) -> None:
    numel = 2 * CONVERTED_CHUNK_NUMEL + 5
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(numel, generator=generator).to(d) for d in (source, destination))
    expected = other + one.to(destination)
    events = allocations(lambda: numerics.add(one, other))
    assert torch.equal(other, expected)
    assert peak_bytes(events) == CONVERTED_CHUNK_NUMEL * destination.itemsize
