"""Dropout whose mask is a function of a seed and an element's position, bitwise equal on every device.

torch's generators differ between devices and have hidden state. Here element ``i`` is kept if a 24-bit hash of (seed,
i) is at least p × 2^24; the seed is an operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroir.torch_ops.define import define, differentiate, fake

_BITS = 24
_WEYL = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def drop(x: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Zero each element of x with probability p, and scale the rest by 1 / (1 − p).

    ``seed`` is i64[1], on the host or on x's device.

    Returns:
        the result, of x's type, and the bool mask, True where an element was kept.
    """
    # A seed on the host is read at launch, so no device has to wait for it.
    return drop_with(x, p, int(seed) if seed.device.type == "cpu" else seed)


def drop_with(x: Tensor, p: float, seed: Tensor | int) -> tuple[Tensor, Tensor]:
    """Compute ``dropout`` with plain operators that a compiler can trace; a tensor seed is on x's device."""
    mask = (hashed(x.numel(), seed, x.device) >= round(p * 2**_BITS)).view(x.shape)
    # In the layout of x, so that the types do not depend on the device.
    return torch.empty_like(x).copy_(x * mask * _scale(p)), torch.empty_like(
        x, dtype=torch.bool
    ).copy_(mask)


dropout = define("zeroir::dropout", drop)


@fake("zeroir::dropout")
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


differentiate(
    "zeroir::dropout",
    lambda grad, mask, p: (grad * mask * _scale(p),),
    lambda inputs, results: (results[1:], inputs[1:2]),
)


def _scale(p: float) -> float:
    return 0.0 if p >= 1 else 1 / (1 - p)


def hashed(numel: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return one integer in [0, 2^24) per position: SplitMix64 (Steele, Lea and Flood, 2014) at (seed, i)."""
    z = torch.arange(1, numel + 1, dtype=torch.int64, device=device)
    z = z.mul_(_signed(_WEYL)).add_(seed)
    for shift, factor in _MIX:
        z = z.bitwise_xor_(_shift(z, shift)).mul_(_signed(factor))
    z = z.bitwise_xor_(_shift(z, 31))
    return _shift(z, 64 - _BITS)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift logically to the right; torch's shift is arithmetic."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
