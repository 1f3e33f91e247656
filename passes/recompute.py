"""Compute a unit's forward once more before its backward, instead of keeping what it saves: activation checkpointing.

A forward then keeps only what others need: the loss, new running statistics, and outputs that other forwards or the
backwards of other units read. What only its own backward reads is made by the forward issued again, as a ``compute`` of
its own just before that backward, and lives from there on. The second run is cut down to these values, so that the
last matrix product of a block, whose result nobody asks for, is not computed twice. It reads what the first run read:
activations stay until then, seeds of dropout are the same, and where the forward changes running statistics the new
ones wait in a buffer until they have been read for the last time. So every bit stays the same, and every statistic
changes once. A unit that is called twice, or whose forward is several segments, is computed once more call by call,
segment by segment. A segment that would keep more bytes than it frees, or whose backward follows at once, stays as it
is.

It goes well with ``select-saved``, which stands before it: that pass lets a backward compute cheap values itself, each
just before its use, so that fewer bytes come to life when the forward is issued again. In the other order all that a
unit saves would be there at once, for ``select-saved`` looks at what reaches from forwards to backwards.

What ``recompute{units=a}`` changes::

    - buffer %m : f32[32] device saved
    + buffer %m : f32[32] device activation
    - return ($3, $2)
    + return ($3)
    + segment @a.recompute($0: f32[4,16], $1: f32[16,8]) workspace eager=114688 {
    + $2 = aten.mm.default($0, $1) : f32[4,8]
    + return ($2)
    - alloc %m  stream=compute
    - compute @a.forward(%x, w: %a.param[0:128]) -> (%h, %m)  unit=a stream=compute
    + compute @a.forward(%x, w: %a.param[0:128]) -> (%h)  unit=a stream=compute
      release %h  stream=compute
    + alloc %m  stream=compute
    + compute @a.recompute(%x, w: %a.param[0:128]) -> (%m)  unit=a stream=compute
      compute @a.backward(%dh, %m, %x) -> (grad w: %a.grad[0:128])  unit=a stream=compute
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import ClassVar

from zeroir.ir.buffers import Buffer
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.ir.segment import Segment
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common.reissue import Body, Call, Pruner
from zeroir.passes.common.units import ALL_REPEATED, check_patterns, matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Pass):
    """Issue the forwards of these units again before their backwards; by default those of all repeated units."""

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    units: tuple[str, ...] = (ALL_REPEATED,)

    def __post_init__(self) -> None:
        check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """The program with what these units save made anew in the backward.

        Raises:
            UserError: where a pattern names no unit.
        """
        units = matching(self.units, program, self.spec())
        pruner = Pruner()
        bodies: dict[tuple[Op, ...], Body] = {}
        for section in program.sections:
            if section.body not in bodies:
                bodies[section.body] = Body(program, section.body, units, pruner)
        if not any(body.is_changed for body in bodies.values()):
            return program
        made: dict[str, Buffer] = {}
        for body in bodies.values():
            made |= body.buffers()
        names = _Names(program)
        calls = {old: tuple(body.ops()) for old, body in bodies.items()}
        names.settle(chain.from_iterable(calls.values()))
        rewritten = {old: tuple(names.named(op) for op in found) for old, found in calls.items()}
        known = [made.pop(buffer.name, buffer) for buffer in program.buffers]
        return replace(
            program,
            buffers=(*known, *made.values()),
            segments=names.segments,
            sections=tuple(replace(s, body=rewritten[s.body]) for s in program.sections),
        )


class _Names:
    """The segments that are called, in the order of their first calls, each under a name of its own."""

    def __init__(self, program: Program) -> None:
        self._known = program.segment_by_name
        self._names: dict[tuple[str, str], str] = {}
        self._segments: list[Segment] = []

    def settle(self, found: Iterable[Op | Call]) -> None:
        """Take in all calls."""
        called: dict[tuple[str, str], Segment] = {}
        for item in found:
            if isinstance(item, Call):
                called.setdefault(_key(item.segment), item.segment)
        taken = {segment.name for segment in called.values() if self._is_as_before(segment)}
        for key, segment in called.items():
            name = segment.name
            if not self._is_as_before(segment):
                wishes = (name if i == 0 else f"{name}.{i}" for i in count())
                name = next(wish for wish in wishes if wish not in taken)
                taken.add(name)
            self._names[key] = name
            self._segments.append(replace(segment, name=name))

    def _is_as_before(self, segment: Segment) -> bool:
        return self._known.get(segment.name) is segment

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments under their names."""
        return tuple(self._segments)

    def named(self, item: Op | Call) -> Op:
        """The op, calling its segment by name."""
        if isinstance(item, Call):
            return replace(item.op, segment=self._names[_key(item.segment)])
        return item


def _key(segment: Segment) -> tuple[str, str]:
    return segment.name, segment.digest()
