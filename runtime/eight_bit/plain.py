"""Optimizer states of 8 bits in plain torch: an optimizer whose states are rounded after each of its steps.

The rounding is defined in ``zeroir/ir/eight_bit_states.py``. Here a state remains an FP32 tensor with the values that
its codes and scales represent.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroir.ir.eight_bit_states import BLOCK_NUMEL, code_values
from zeroir.ir.optimizers.forms import CODES, is_signed
from zeroir.runtime.optimizers.plain import PlainOptimizer


class WithRoundedStates:
    """Steps like the wrapped optimizer, and then rounds its states. Blocks start at each parameter."""

    def __init__(self, optimizer: PlainOptimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with its gradient."""
        self.optimizer.step()
        for states in self.state.values():
            for name in CODES.keys() & states.keys():
                states[name].copy_(rounded(states[name], signed=is_signed(name)))


def rounded(values: Tensor, *, signed: bool) -> Tensor:
    """Return the nearest values that 8-bit codes with FP32 scales of blocks of 256 represent, in the same shape."""
    table = torch.tensor(sorted(code_values(signed=signed)))
    flat = values.flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    scales = blocks.abs().amax(1, keepdim=True)
    ratios = torch.where(scales > 0, blocks / scales, 0.0)
    middles = (table[1:].double() + table[:-1].double()) / 2
    numbers = torch.bucketize(ratios.double(), middles)
    if not signed:
        numbers = torch.where(ratios > 0, numbers.clamp(min=1), numbers)
    return (table[numbers] * scales).flatten()[: flat.numel()].view(values.shape)
