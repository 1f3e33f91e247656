"""Which ops may not change places: those that touch one element, at least one of them changing it.

Everything is judged by effects. Allocating and releasing change the whole buffer, and a rank's slice counts as the
whole of what it is cut from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from zeroir.ir.effects import Effects, effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program

Touch = tuple[str, int, int, bool]
"""A buffer, the first and one past the last of its elements that are touched, and whether they are changed.

A plain tuple, because there are millions of them.
"""


def touches(effect: Effects, program: Program) -> list[Touch]:
    """What an op touches."""
    found = [(r.buffer, r.offset, r.offset + r.numel, False) for r in effect.reads]
    found += [(r.buffer, r.offset, r.offset + r.numel, True) for r in effect.writes]
    found += [(r.buffer, r.offset, r.offset + r.numel, True) for r in effect.accumulates]
    for name in (*effect.allocs, *effect.frees):
        found.append((name, 0, program.buffer_by_name[name].numel, True))
    return found


class Touched:
    """What a number of ops touch, to ask which of them an op may not change places with."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._changes: dict[str, list[tuple[int, int, int]]] = {}
        self._reads: dict[str, list[tuple[int, int, int]]] = {}

    def add(self, op: Op, index: int) -> None:
        """Take in an op under a number, which need not be its own."""
        for buffer, start, stop, is_write in touches(effects(op), self._program):
            found = self._changes if is_write else self._reads
            found.setdefault(buffer, []).append((start, stop, index))

    def is_against(self, op: Op) -> bool:
        """Whether the op may not change places with one of them."""
        return next(self.against([op]), None) is not None

    def against(self, ops: Iterable[Op]) -> Iterator[int]:
        """The numbers of the ops that none of these may change places with, some more than once."""
        for op in ops:
            for buffer, start, stop, is_write in touches(effects(op), self._program):
                reads = self._reads.get(buffer, ()) if is_write else ()
                for first, last, index in chain(self._changes.get(buffer, ()), reads):
                    if start < last and first < stop:
                        yield index
