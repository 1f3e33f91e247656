"""Which ops may not change places: those that touch one element, at least one of them changing it.

Everything is judged by effects. Allocating and releasing change the whole buffer, and a rank's slice counts as the
whole of what it is cut from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from zeroir.ir.effects import Effects, effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program


class Touch(NamedTuple):
    """Elements ``[start, stop)`` of a buffer, and whether they are changed."""

    buffer: str
    start: int
    stop: int
    is_write: bool

    def is_against(self, other: Touch) -> bool:
        """Whether the two, of one buffer, must keep their order."""
        is_change = self.is_write or other.is_write
        return is_change and self.start < other.stop and other.start < self.stop


def touches(effect: Effects, program: Program) -> Iterator[Touch]:
    """What an op touches."""
    for region in effect.reads:
        yield Touch(region.buffer, region.offset, region.stop, is_write=False)
    for region in (*effect.writes, *effect.accumulates):
        yield Touch(region.buffer, region.offset, region.stop, is_write=True)
    for name in (*effect.allocs, *effect.frees):
        yield Touch(name, 0, program.buffer_by_name[name].numel, is_write=True)


class Touched:
    """What a number of ops touch, to ask which of them an op may not change places with."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._changes: dict[str, list[tuple[Touch, int]]] = {}
        self._reads: dict[str, list[tuple[Touch, int]]] = {}

    def add(self, op: Op, index: int) -> None:
        """Take in an op under a number, which need not be its own."""
        for touch in touches(effects(op), self._program):
            found = self._changes if touch.is_write else self._reads
            found.setdefault(touch.buffer, []).append((touch, index))

    def is_against(self, op: Op) -> bool:
        """Whether the op may not change places with one of them."""
        return next(self.against([op]), None) is not None

    def against(self, ops: Iterable[Op]) -> Iterator[int]:
        """The numbers of the ops that none of these may change places with, some more than once."""
        for op in ops:
            for touch in touches(effects(op), self._program):
                name = touch.buffer
                reads = self._reads.get(name, ()) if touch.is_write else ()
                for other, index in chain(self._changes.get(name, ()), reads):
                    if touch.is_against(other):
                        yield index
