"""Elements of a buffer on disk, for consumers that read them chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zeroir.runtime.memory.rank_memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsOnDisk:
    """Elements ``[start, stop)`` of a buffer on disk, which are read chunk by chunk."""

    memory: RankMemory
    buffer: str
    start: int
    stop: int

    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    def chunks(self) -> Iterator[Tensor]:
        """Return copies of the elements, chunk by chunk in order."""
        return self.memory.read_in_chunks(self.buffer, self.start, self.stop)
