"""Ops that must keep their order: those that access a common element which at least one of them changes.

This is derived from the ops' effects alone. Allocating and releasing change the whole buffer, and a rank's slice counts
as the whole region that it is a slice of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program

Touch = tuple[str, int, int, bool]
"""A buffer, the first and one past the last of its elements that an op accesses, and whether the op changes them.

A plain tuple, because there are millions of them."""


def touches(effect: Effects, program: Program) -> list[Touch]:
    """Return the elements that an op accesses."""
    touched = [(r.buffer, r.offset, r.offset + r.numel, False) for r in effect.reads]
    for regions in (effect.writes, effect.accumulates):
        touched += [(r.buffer, r.offset, r.offset + r.numel, True) for r in regions]
    for names in (effect.allocs, effect.frees):
        touched += [(name, 0, program.buffer_by_name[name].numel, True) for name in names]
    return touched


class Touched:
    """The elements that some ops access, to find those of these ops with which another op must keep its order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._changes: dict[str, list[tuple[int, int, int]]] = {}
        self._reads: dict[str, list[tuple[int, int, int]]] = {}

    def add(self, op: Op, index: int) -> None:
        """Add an op with a number, which need not be its index."""
        for buffer, start, stop, is_write in touches(effects(op), self._program):
            ranges = self._changes if is_write else self._reads
            ranges.setdefault(buffer, []).append((start, stop, index))

    def is_against(self, op: Op) -> bool:
        """Return whether the op must keep its order with one of them."""
        return next(self.against([op]), None) is not None

    def against(self, ops: Iterable[Op]) -> Iterator[int]:
        """Yield the numbers of the ops with which one of these must keep its order, some more than once."""
        for op in ops:
            for buffer, start, stop, is_write in touches(effects(op), self._program):
                reads = self._reads.get(buffer, ()) if is_write else ()
                for first, last, index in chain(self._changes.get(buffer, ()), reads):
                    if start < last and first < stop:
                        yield index
