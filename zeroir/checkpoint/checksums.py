"""Checksums of tensors, files and manifests: XXH3 with 128 bits, as ``xxh3_128:`` and 32 hexadecimal digits.

XXH3 hashes faster than memory delivers, and ``xxhsum -H2`` computes it without Python. It finds
accidents, not forgeries.
"""

from __future__ import annotations

from typing import Final

import xxhash

PREFIX: Final = "xxh3_128:"


class Checksum:
    """The checksum of bytes that come in several parts."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._state.update(data)

    @property
    def text(self) -> str:
        """The checksum of the bytes so far."""
        return PREFIX + self._state.hexdigest()


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """The checksum of bytes."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)
