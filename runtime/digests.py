"""Digests of tensors that ranks hold in parts: the digest of the whole is the sum of those of its parts.

A tensor counts as 64-bit words in the order of its elements. Each word is multiplied by a number that belongs to its
position, and all of that is added up modulo 2⁶⁴: zeros stand for the elements that a part lacks. An element that
differs, or stands elsewhere, gives another sum but for an accident; nothing is proof against somebody who means harm.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK_WORDS: Final = 1 << 13
"""Small enough for a cache, for one thread, and for memory that the C library need not ask the kernel for each time."""

_WORD_BYTES: Final = 8


class Digester:
    """Computes digests, and keeps what they are computed with."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def digest(self, values: Tensor, first: int) -> Tensor:
        """The digest (i64[], on the tensor's device) of a flat tensor, which begins with the ``first`` of the whole."""
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        per_word = _WORD_BYTES // values.itemsize
        per_block = _BLOCK_WORDS * per_word
        start = 0
        while start < values.numel():
            block, place = divmod(first + start, per_block)
            stop = min(start + per_block - place, values.numel())
            words = _words(values[start:stop], place % per_word, per_word)
            factors = self._of(values.device)[place // per_word :][: words.numel()]
            # Odd, so that no bit of the sum is lost.
            total += (words * factors).sum() * (2 * block + 1)
            start = stop
        return total

    def _of(self, device: torch.device) -> Tensor:
        """An odd number for each position in a block (i64)."""
        if device not in self._factors:
            factors = torch.arange(1, 1 + _BLOCK_WORDS, dtype=torch.int64, device=device)
            for _ in range(2):
                factors = factors * -0x61C8864680B583EB
                factors ^= factors >> 29
            self._factors[device] = factors | 1
        return self._factors[device]


def _words(values: Tensor, place: int, per_word: int) -> Tensor:
    """The values as words (i64), the first of them at that place in its word, with zeros for what else is in a word."""
    trail = -(place + values.numel()) % per_word
    if place or trail or values.storage_offset() % per_word:
        whole = values.new_zeros(place + values.numel() + trail)
        whole[place : place + values.numel()] = values
        values = whole
    return values.view(torch.int64)
