"""Digests of tensors that ranks hold in parts: the digest of the whole is the sum of those of its parts.

Each element's bits are multiplied by a number that belongs to its position, and all of that is added up modulo 2⁶⁴. An
element that differs, or stands elsewhere, gives another sum (but for one chance in 2⁶⁴ or so); nothing is proof against
somebody who means harm.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK_NUMEL: Final = 1 << 16
"""What stays in a cache together with its 64-bit form and the factors."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor, first: int) -> Tensor:
    """The digest (i64[], on the tensor's device) of a flat tensor whose first element is the ``first`` of the whole."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.view(_BITS[values.itemsize])
    start = 0
    while start < bits.numel():
        block, place = divmod(first + start, _BLOCK_NUMEL)
        stop = min(start + _BLOCK_NUMEL - place, bits.numel())
        factors = _factors(values.device)[place : place + stop - start]
        # Odd, so that no bit of the sum is lost.
        total += (bits[start:stop] * factors).sum() * (2 * block + 1)
        start = stop
    return total


def _factors(device: torch.device) -> Tensor:
    """An odd number for each position in a block (i64)."""
    factors = torch.arange(1, 1 + _BLOCK_NUMEL, dtype=torch.int64, device=device)
    for _ in range(2):
        factors = factors * -0x61C8864680B583EB
        factors ^= factors >> 29
    return factors | 1
