"""Codes and scales of blocks in torch, and updates of states of 8 bits, against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from tests.runtime.test_optim import CASES
from tests.support.examples import examples
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, code_values
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.forms import is_signed
from zeroir.runtime.eight_bit import update as eight_bit_update
from zeroir.runtime.eight_bit.rounding import Scratch, narrow, widen
from zeroir.runtime.eight_bit.update import CodedState, CodedUpdate
from zeroir.runtime.optimizers.catalogue import element_update
from zeroir.runtime.optimizers.chunked_update import GroupPieces
from zeroir.runtime.optimizers.operands import Operands

CPU = torch.device("cpu")
CODED = [(algorithm, hyper) for algorithm, hyper in CASES if algorithm.has_states_of_elements]


def narrowed(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.full((values.numel(),), 77, dtype=torch.uint8)
    absmax = torch.full((values.numel() // BLOCK_NUMEL,), 7.0)
    narrow(values.clone(), codes, absmax, Scratch(values.numel(), CPU), signed=signed)
    return codes, absmax


def widened(codes: Tensor, absmax: Tensor, *, signed: bool) -> Tensor:
    values = torch.full((codes.numel(),), torch.nan)
    widen(codes, absmax, values, Scratch(codes.numel(), CPU), signed=signed)
    return values


def plainly_narrowed(
    values: NDArray[np.float32], *, signed: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Each element is divided by its block's largest and rounded to the nearest value, the smaller of two.

    Without a sign, only 0 becomes 0.
    """
    table = np.array(code_values(signed=signed), dtype=np.float32).astype(np.float64)
    order = np.argsort(table)
    codes, scales = [], []
    for block in values.reshape(-1, BLOCK_NUMEL):
        scale = np.abs(block).max()
        scales.append(scale)
        for value in block / scale if scale > 0 else np.zeros_like(block):
            distances = np.abs(table[order] - np.float64(value))
            index = int(np.argmin(distances))
            codes.append(order[max(index, 1) if value > 0 and not signed else index])
    return np.array(codes, dtype=np.uint8), np.array(scales, dtype=np.float32)


FLOATS = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45]),
)
BLOCKS = hnp.arrays(np.float32, 2 * BLOCK_NUMEL, elements=FLOATS)


@examples(60)
@given(values=BLOCKS, signed=st.booleans())
def test_each_element_gets_the_nearest_value(values: NDArray[np.float32], signed: bool) -> None:
    values = values if signed else np.abs(values)
    codes, absmax = narrowed(torch.from_numpy(values), signed=signed)
    expected_codes, expected_scales = plainly_narrowed(values, signed=signed)
    assert np.array_equal(codes.numpy(), expected_codes)
    assert np.array_equal(absmax.numpy(), expected_scales)


@examples(60)
@given(values=BLOCKS, signed=st.booleans())
def test_widening_undoes_narrowing_within_half_a_step(
    values: NDArray[np.float32], signed: bool
) -> None:
    values = values if signed else np.abs(values)
    codes, absmax = narrowed(torch.from_numpy(values), signed=signed)
    back = widened(codes, absmax, signed=signed).numpy().reshape(-1, BLOCK_NUMEL)
    blocks, scales = values.reshape(-1, BLOCK_NUMEL), absmax.numpy()[:, None]
    steps = np.diff(np.sort(np.array(code_values(signed=signed))))
    # The division, the value, and the product round, too; tiny scales have few bits.
    slack = 1e-6 * scales + 1e-44
    assert (np.abs(back - blocks) <= steps.max() / 2 * scales + slack).all()
    assert (back[blocks == 0] == 0).all()
    with np.errstate(invalid="ignore", divide="ignore"):
        is_positive = blocks / scales > 0
    # Adam divides by the root of the second moment, which must not vanish.
    assert signed or (codes.numpy().reshape(-1, BLOCK_NUMEL)[is_positive] > 0).all()
    assert (np.sign(back) * np.sign(blocks) >= 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_comes_back_and_order_is_kept(signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = widened(codes, torch.tensor([3.0]), signed=signed)
    again, absmax = narrowed(values, signed=signed)
    assert torch.equal(again, codes)
    assert absmax.item() == 3.0
    ascending = torch.linspace(-1.0 if signed else 0.0, 1.0, 100 * BLOCK_NUMEL)
    # One scale for all blocks, so that the blocks can be compared.
    blocks = ascending.view(100, -1).clone()
    blocks[:, 0] = 1.0
    back = widened(*narrowed(blocks.view(-1), signed=signed), signed=signed).view(100, -1)[:, 1:]
    assert (back.reshape(-1).diff() >= 0).all()


def test_blocks_do_not_know_each_other() -> None:
    values = torch.randn(4 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(0))
    values[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = 0.0
    values[2 * BLOCK_NUMEL] = torch.nan
    values[3 * BLOCK_NUMEL] = torch.inf
    codes, absmax = narrowed(values, signed=True)
    alone = [narrowed(block, signed=True) for block in values.view(-1, BLOCK_NUMEL)]
    assert torch.equal(codes, torch.cat([c for c, _ in alone]))
    wide = widened(codes, absmax, signed=True)
    assert torch.equal(codes[BLOCK_NUMEL : 2 * BLOCK_NUMEL].count_nonzero(), torch.tensor(0))
    assert wide[: 2 * BLOCK_NUMEL].isfinite().all()
    assert wide[2 * BLOCK_NUMEL : 3 * BLOCK_NUMEL].isnan().all()
    assert not wide[3 * BLOCK_NUMEL].isfinite()


def coded_update(
    algorithm: Algorithm,
    hyper: tuple[float, ...],
    param: Tensor,
    states: list[tuple[Tensor, Tensor]],
    *,
    grad: Tensor,
    step: float = 1.0,
    skip: float = 0.0,
) -> CodedUpdate:
    """The step of all elements, whose parameters and states it updates in place."""
    operands = Operands(
        params=(),
        grads=(),
        states=(),
        step=torch.tensor([step]),
        lr=torch.tensor([0.0123], dtype=torch.float64),
        hyper=torch.tensor(hyper, dtype=torch.float64),
        divisor=torch.tensor([3.0]),
        skip=torch.tensor([skip]),
    )
    return CodedUpdate(
        algorithm=algorithm,
        param=param,
        grad=grad.clone(),
        states=[
            CodedState(codes=codes, absmax=absmax, signed=is_signed(name))
            for name, (codes, absmax) in zip(algorithm.state_names, states, strict=True)
        ],
        groups=[GroupPieces(pieces=[slice(0, param.numel())], operands=operands)],
        skip=operands.skip,
    )


def zero_states(algorithm: Algorithm, numel: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.zeros(numel, dtype=torch.uint8), torch.zeros(numel // BLOCK_NUMEL))
        for _ in algorithm.state_names
    ]


@pytest.mark.parametrize(("algorithm", "hyper"), CODED)
def test_an_update_is_that_of_widened_states(
    algorithm: Algorithm, hyper: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps by the kernels of FP32 states, between which the reference rounds the states element by element."""
    monkeypatch.setattr(eight_bit_update, "CODED_CPU_CHUNK_NUMEL", 2 * BLOCK_NUMEL)
    numel = 5 * BLOCK_NUMEL
    generator = torch.Generator().manual_seed(3)
    param = torch.randn(numel, generator=generator)
    states = zero_states(algorithm, numel)
    expected, wide = param.clone(), [torch.zeros(numel) for _ in algorithm.state_names]
    for step in range(1, 6):
        grad = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)
        coded_update(algorithm, hyper, param, states, grad=grad, step=float(step))()
        element_update(algorithm).update(
            Operands(
                params=[expected],
                grads=[grad.clone()],
                states=[[state] for state in wide],
                step=torch.tensor([float(step)]),
                lr=torch.tensor([0.0123], dtype=torch.float64),
                hyper=torch.tensor(hyper, dtype=torch.float64),
                divisor=torch.tensor([3.0]),
                skip=None,
            )
        )
        assert torch.equal(param, expected)
        for name, state, (codes, absmax) in zip(algorithm.state_names, wide, states, strict=True):
            signed = is_signed(name)
            rounded, scales = plainly_narrowed(state.numpy(), signed=signed)
            assert np.array_equal(codes.numpy(), rounded)
            assert np.array_equal(absmax.numpy(), scales)
            table = np.array(code_values(signed=signed), dtype=np.float32)
            state.copy_(torch.from_numpy(table[rounded] * np.repeat(scales, BLOCK_NUMEL)))


@pytest.mark.parametrize(("algorithm", "hyper"), CODED)
def test_a_skipped_update_keeps_every_byte(algorithm: Algorithm, hyper: tuple[float, ...]) -> None:
    numel = 2 * BLOCK_NUMEL
    generator = torch.Generator().manual_seed(4)
    param = torch.randn(numel, generator=generator)
    states = [
        (
            torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator),
            torch.rand(2, generator=generator),
        )
        for _ in algorithm.state_names
    ]
    before = [param.clone(), *(tensor.clone() for state in states for tensor in state)]
    infinite = torch.full((numel,), torch.inf)
    coded_update(algorithm, hyper, param, states, grad=infinite, skip=1.0)()
    after = [param, *(tensor for state in states for tensor in state)]
    assert all(map(torch.equal, before, after))
