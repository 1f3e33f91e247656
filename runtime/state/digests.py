"""Digests of sharded tensors: the digest of the whole is the sum of the digests of its parts.

A tensor is read as 64-bit words in the order of its elements; elements outside a part count as zeros. Each word is
multiplied by a factor that depends on its position, and the products are added modulo 2⁶⁴. A changed or displaced
element changes the sum, except by accident. The digest does not protect against deliberate changes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK_WORDS: Final = 1 << 13
"""Small enough for the cache, for one thread, and for memory that the C library keeps instead of returning it."""

_WORD_BYTES: Final = 8


class Digester:
    """Computes digests, and caches the factors of words on each device."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def digest(self, values: Tensor, first: int) -> Tensor:
        """Return the digest (i64[], on its device) of a flat tensor that starts at element ``first`` of the whole."""
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        per_word = _WORD_BYTES // values.itemsize
        per_block = _BLOCK_WORDS * per_word
        start = 0
        while start < values.numel():
            block, offset = divmod(first + start, per_block)
            stop = min(start + per_block - offset, values.numel())
            words = _words(values[start:stop], offset % per_word, per_word)
            factors = self._factors_on(values.device)[offset // per_word :][: words.numel()]
            # The factor is odd, so no bit of the sum is lost.
            total += (words * factors).sum() * (2 * block + 1)
            start = stop
        return total

    def _factors_on(self, device: torch.device) -> Tensor:
        """Return an odd number for each position in a block (i64)."""
        if device not in self._factors:
            factors = torch.arange(1, 1 + _BLOCK_WORDS, dtype=torch.int64, device=device)
            for _ in range(2):
                factors = factors * -0x61C8864680B583EB
                factors ^= factors >> 29
            self._factors[device] = factors | 1
        return self._factors[device]


def _words(values: Tensor, offset: int, per_word: int) -> Tensor:
    """Return the values as words (i64), the first value at an offset in its word.

    The outer words are padded with zeros.
    """
    trailing = -(offset + values.numel()) % per_word
    if offset or trailing or values.storage_offset() % per_word:
        padded = values.new_zeros(offset + values.numel() + trailing)
        padded[offset : offset + values.numel()] = values
        values = padded
    return values.view(torch.int64)
