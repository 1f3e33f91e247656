"""Checksums of tensors, files and manifests: 128-bit XXH3, as ``xxh3_128:`` and 32 hexadecimal digits.

XXH3 hashes faster than memory can be read, and ``xxhsum -H2`` computes it without Python. It detects accidental damage,
not forgery.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, Self

import xxhash

PREFIX: Final = "xxh3_128:"


class Checksum:
    """The checksum of bytes that arrive in several parts."""

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
    """A context manager with a thread that adds bytes to checksums while the caller writes them.

    Python's executors refuse work as soon as the main thread has ended. A plain thread still serves the last save of a
    program that does not wait for it.
    """

    __slots__ = ("_begun", "_ended", "_thread")

    def __init__(self) -> None:
        self._begun: SimpleQueue[tuple[memoryview, Sequence[Checksum]] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zeroir-hash", daemon=True)

    def begin(self, data: memoryview, checksums: Sequence[Checksum]) -> None:
        """Start to add bytes to each of the checksums; they must not change before ``end``."""
        self._begun.put((data, checksums))

    def end(self) -> None:
        """Wait until the bytes passed to ``begin`` are added."""
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
    """Return the checksum of bytes."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)
