"""Checksums of tensors, files and manifests: XXH3 with 128 bits, as ``xxh3_128:`` and 32 hexadecimal digits.

XXH3 hashes faster than memory delivers, and ``xxhsum -H2`` computes it without Python. It finds
accidents, not forgeries.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, Self

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


class HashingThread:
    """A thread that adds bytes to checksums while its owner writes them. A context manager.

    The executors of Python refuse work as soon as the main thread has ended; a plain thread still serves the last save
    of a program that does not wait for it.
    """

    __slots__ = ("_begun", "_ended", "_thread")

    def __init__(self) -> None:
        self._begun: SimpleQueue[tuple[memoryview, Sequence[Checksum]] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zeroir-hash", daemon=True)

    def begin(self, data: memoryview, checksums: Sequence[Checksum]) -> None:
        """Begin to add bytes to each of the checksums; nobody may change them before ``end``."""
        self._begun.put((data, checksums))

    def end(self) -> None:
        """Wait until the bytes of ``begin`` are added."""
        self._ended.get()

    def _run(self) -> None:
        while (work := self._begun.get()) is not None:
            data, checksums = work
            for checksum in checksums:
                checksum.add(data)
            self._ended.put(None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.put(None)
        self._thread.join()


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """The checksum of bytes."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)
