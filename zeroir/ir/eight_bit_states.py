"""Optimizer states of 8 bits: one code for each element, and one FP32 scale for each block of 256 elements.

This is the block-wise dynamic quantisation of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861, sections 2.1 and 2.2). The scale of a block is its largest absolute value; each element is divided by
it and rounded to the nearest of 256 values, which are densest near 0: the smallest is below 1e-6.

One rule differs from the paper: a positive second moment never becomes 0. If it did, and the next gradient were 0, Adam
would divide the first moment by eps alone, and the parameter would be lost.

A block belongs to one parameter, and no shard splits a block. So the bits of a state depend neither on the stage, the
world size or the units, nor on neighbouring parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Final

BLOCK_NUMEL: Final = 256
"""The elements that share a scale. Parameters with 8-bit states start at multiples of it, and shards are multiples."""

CODES_COUNT: Final = 256
"""The number of values of a code."""

_DECADES: Final = 7
"""The powers of ten, from 1e-7 to 1, that the values span."""


def blocks_numel(numel: int) -> int:
    """Return the number of blocks of that many elements; the last one may be partly padding."""
    return -(-numel // BLOCK_NUMEL)


@cache
def code_values(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values in [-1, 1], or in [0, 1], of codes 0 to 255, in FP64.

    These are the values of bitsandbytes' dynamic map. Its decade i = 0 … 6 covers (10^(i-7), 10^(i-6)] with 2^i values
    (2^(i+1) without a sign), the centres of intervals of equal length, and 0 and 1 are additional values; so the
    largest negative value is about -0.993. There codes number the values in ascending order. Here code 0 is the value
    0, followed by the positive values in ascending order and then the negative ones: a state of zeros, and padding, are
    zero bytes.
    """
    positive = [1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade if signed else decade + 1)
        scale = 10.0 ** (decade - _DECADES + 1)
        positive += [scale * (0.1 + 0.9 * (2 * i + 1) / (2 * count)) for i in range(count)]
    negative = sorted(-value for value in positive if value != 1.0) if signed else []
    values = (0.0, *sorted(positive), *negative)
    assert len(values) == CODES_COUNT
    return values
