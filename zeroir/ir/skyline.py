"""How high memory is taken at each moment: a step function that long lives raise, kept by blocks of moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 512
_MIXED: Final = -1


class Skyline:
    """A height for each of so many moments, 0 at first. Windows are half-open ranges of moments."""

    def __init__(self, stop: int) -> None:
        blocks = stop // _BLOCK + 1
        self._fine = np.zeros((blocks, _BLOCK), dtype=np.int64)
        # The height of a block where it is the same everywhere: then the fine one counts for nothing.
        self._coarse = np.zeros(blocks, dtype=np.int64)

    def raise_level(self, windows: Sequence[tuple[int, int]], size: int) -> int | None:
        """Put ``size`` on top if the height is one in all these windows: that height, else None and nothing changes."""
        base = self._at(windows[0][0])
        if not all(self._is_level(first, stop, base) for first, stop in windows):
            return None
        for first, stop in windows:
            self._raise(first, stop, base + size)
        return base

    def heights(self) -> NDArray[np.int64]:
        """The height at every moment."""
        whole = np.where(self._coarse == _MIXED, 0, self._coarse)[:, None]
        return np.where(self._coarse[:, None] == _MIXED, self._fine, whole).reshape(-1)

    def _at(self, moment: int) -> int:
        block, rest = divmod(moment, _BLOCK)
        known = int(self._coarse[block])
        return int(self._fine[block, rest]) if known == _MIXED else known

    def _is_level(self, first: int, stop: int, base: int) -> bool:
        if self._at(stop - 1) != base:
            return False
        begin, end = first // _BLOCK, (stop - 1) // _BLOCK
        inner = self._coarse[begin : end + 1]
        for at in np.flatnonzero(inner != base).tolist():
            if inner[at] != _MIXED:
                return False
            block = begin + at
            low = first - block * _BLOCK if block == begin else 0
            high = stop - block * _BLOCK if block == end else _BLOCK
            if not bool((self._fine[block, low:high] == base).all()):
                return False
        return True

    def _raise(self, first: int, stop: int, height: int) -> None:
        begin, end = first // _BLOCK, (stop - 1) // _BLOCK
        self._coarse[begin + 1 : end] = height
        for block in {begin, end}:
            low = first - block * _BLOCK if block == begin else 0
            high = stop - block * _BLOCK if block == end else _BLOCK
            if self._coarse[block] != _MIXED:
                self._fine[block] = self._coarse[block]
                self._coarse[block] = _MIXED
            self._fine[block, low:high] = height
