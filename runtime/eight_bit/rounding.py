"""Conversion of codes and scales of blocks to FP32, and back.

They are defined in ``zeroir/ir/eight_bit_states.py``. Each block is converted separately, and each operation rounds
separately, so the bits depend neither on other blocks nor on the sharding, and every device computes the same. Rounding
needs no search: the upper half of the bits of an FP32 number (sign, exponent, 7 bits of the fraction) leaves at most
two codes, and one comparison decides between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, code_values
from zeroir.ir.optimizers.forms import is_signed

_UPPER_HALVES = 1 << 16
"""The number of upper halves of FP32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeMap:
    """The tables of a map of codes on one device.

    ``values`` are the FP32 values of the codes, f32[256]. The upper half of a number's bits selects an element of
    ``codes``, u8[65536], and of ``bounds``, f32[65536]: a number up to the bound gets this code, a larger one the next
    code. So a number midway between two values gets the smaller value; in unsigned maps no positive number gets the
    value 0. The tables take 330 kB of the device, which the memory model does not count.
    """

    values: Tensor
    codes: Tensor
    bounds: Tensor


@cache
def code_map(device: torch.device, *, signed: bool) -> CodeMap:
    """Return the tables of the signed or unsigned map."""
    values = np.array(code_values(signed=signed), dtype=np.float32)
    order = np.argsort(values, kind="stable")
    ascending = values[order].astype(np.float64)
    middles = (ascending[:-1] + ascending[1:]) / 2
    bounds = middles.astype(np.float32)
    # The bound is the largest FP32 number that is not above the middle.
    bounds = np.where(bounds > middles, np.nextafter(bounds, np.float32(-np.inf)), bounds)
    if not signed:
        bounds[0] = 0.0
    halves = np.arange(_UPPER_HALVES, dtype=np.uint32) << 16
    ends = np.stack([halves, halves | np.uint32(0xFFFF)]).view(np.float32)
    # An upper half of NaNs has only one code: the scale makes such a block NaN.
    least, most = np.sort(np.where(np.isnan(ends), ends[:1], ends), axis=0)
    first = np.searchsorted(bounds, least, side="left")
    last = np.searchsorted(bounds, most, side="left")
    has_bound = last > first
    if (last > first + 1).any():
        raise InternalError("the upper half of a number leaves more than two codes")
    own_bounds = np.where(has_bound, bounds[np.minimum(first, len(bounds) - 1)], np.float32(np.inf))
    return CodeMap(
        values=torch.from_numpy(values).to(device),
        codes=torch.from_numpy(order[first].astype(np.uint8)).to(device),
        bounds=torch.from_numpy(own_bounds).to(device),
    )


class Scratch:
    """Scratch memory for ``numel`` elements: ``uppers`` i32, ``numbers`` f32, ``codes`` u8 and ``answers`` bool."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.uppers = torch.empty(numel, dtype=torch.int32, device=device)
        self.numbers = torch.empty(numel, dtype=torch.float32, device=device)
        self.codes = torch.empty(numel, dtype=torch.uint8, device=device)
        self.answers = torch.empty(numel, dtype=torch.bool, device=device)


def widen(codes: Tensor, absmax: Tensor, out: Tensor, scratch: Scratch, *, signed: bool) -> None:
    """Write the FP32 values of whole blocks to ``out``.

    ``codes`` is u8 and ``out`` f32, of the same numel; ``absmax`` is f32 with an element for each block. ``scratch``
    has room for at least as many elements.
    """
    uppers = scratch.uppers[: codes.numel()]
    uppers.copy_(codes)
    torch.index_select(code_map(codes.device, signed=signed).values, 0, uppers, out=out)
    out.view(-1, BLOCK_NUMEL).mul_(absmax.unsqueeze(1))


def narrow(
    values: Tensor,
    codes: Tensor,
    absmax: Tensor,
    scratch: Scratch,
    *,
    signed: bool,
    is_skipped: Tensor | None = None,
) -> None:
    """Round the FP32 ``values`` of whole blocks to codes and scales; ``values`` are overwritten.

    The tensors are those of ``widen``. Where ``is_skipped`` (bool[1]) is True, codes and scales are unchanged. A block
    with a NaN widens to NaN everywhere, and one with infinities to NaN at the infinities.
    """
    numel = codes.numel()
    numbers, uppers = scratch.numbers[:numel], scratch.uppers[:numel]
    new_codes, is_above = scratch.codes[:numel], scratch.answers[:numel]
    tables = code_map(codes.device, signed=signed)
    blocks = values.view(-1, BLOCK_NUMEL)
    scales = torch.abs(blocks, out=numbers.view(-1, BLOCK_NUMEL)).amax(1)
    # A block of zeros has the scale 0, which cannot be a divisor, and the code of 0.
    blocks.div_(torch.where(scales == 0, 1.0, scales).unsqueeze(1))
    torch.bitwise_right_shift(values.view(torch.int32), 16, out=uppers)
    uppers.bitwise_and_(_UPPER_HALVES - 1)
    torch.index_select(tables.bounds, 0, uppers, out=numbers)
    torch.gt(values, numbers, out=is_above)
    torch.index_select(tables.codes, 0, uppers, out=new_codes)
    # Code 255 is the negative value nearest to 0, and the next code is 0.
    new_codes.add_(is_above.view(torch.uint8))
    if is_skipped is None:
        codes.copy_(new_codes)
        absmax.copy_(scales)
    else:
        torch.where(is_skipped, codes, new_codes, out=codes)
        torch.where(is_skipped, absmax, scales, out=absmax)


def widened(state: str, codes: Tensor, absmax: Tensor) -> Tensor:
    """Return the FP32 values of whole blocks of a state, in new memory."""
    values = torch.empty(codes.numel(), device=codes.device)
    scratch = Scratch(codes.numel(), codes.device)
    widen(codes, absmax, values, scratch, signed=is_signed(state))
    return values
