"""States of 8 bits on a GPU: the codes and scales of the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.runtime.eight_bit.rounding import Scratch, narrow, widen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("signed", [True, False])
def test_a_gpu_rounds_and_widens_as_the_cpu_does(signed: bool) -> None:
    numel = 1000 * BLOCK_NUMEL
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator)
    values *= torch.exp(4 * torch.randn(numel, generator=generator))
    values = values if signed else values.abs()
    values[:BLOCK_NUMEL] = 0.0
    results = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        own = values.to(device, copy=True)
        codes = torch.empty(numel, dtype=torch.uint8, device=device)
        scales = torch.empty(numel // BLOCK_NUMEL, device=device)
        scratch = Scratch(numel, device)
        narrow(own, codes, scales, scratch, signed=signed)
        widen(codes, scales, own, scratch, signed=signed)
        results.append([tensor.cpu() for tensor in (codes, scales, own)])
    assert all(map(torch.equal, *results))
