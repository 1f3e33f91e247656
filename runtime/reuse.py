"""When released memory may be used again: what the ops issued so far put in order, and what is kept until then.

A device's allocator gives memory back to the stream that took it, which may be ahead of the stream that released it.
Left to itself it would ask the device whether the releasing stream has come that far, and while the host runs ahead of
the device, as it should, the answer is no: every unit's parameters would get memory of their own. The program knows
better. Its waits order the stream that takes memory after the release, so here released memory is kept until such a
wait is issued, and then goes back at once: what is live on the device is what the program says, however far ahead the
host is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroir.ir import ops
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section

Clock = Mapping[str, int]
"""For each stream, how many of its ops are surely finished."""


class Clocks:
    """What every stream comes after, from the ops that were issued."""

    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = {}
        self._at: dict[str, tuple[str, dict[str, int]]] = {}

    def issue(self, op: Op) -> None:
        """An op, or a wait, was issued."""
        match op:
            case ops.Wait():
                _, clock = self._at.get(op.waited, ("", {}))
                if op.on == HOST:
                    for own in (self._of(HOST), *self._clocks.values()):
                        _join(own, clock)
                else:
                    _join(self._of(op.on), clock)
            case _:
                clock = self._of(op.stream)
                clock[op.stream] = clock.get(op.stream, 0) + 1
                if op.event is not None:
                    self._at[op.event] = (op.stream, dict(clock))

    def join(self, pending: Collection[str]) -> None:
        """A joint was issued: see ``Streams.join``."""
        counts = {stream: clock.get(stream, 0) for stream, clock in self._clocks.items()}
        for event in pending:
            if event in self._at:
                stream, clock = self._at[event]
                counts[stream] = min(counts[stream], clock[stream] - 1)
        for own in (self._of(HOST), *self._clocks.values()):
            _join(own, counts)

    def clock(self, stream: str) -> Clock:
        """What the next op of the stream comes after."""
        return dict(self._of(stream))

    def is_after(self, stream: str, clock: Clock) -> bool:
        """Whether the next op of the stream comes after all of that."""
        own = self._of(stream)
        return all(own.get(other, 0) >= count for other, count in clock.items())

    def _of(self, stream: str) -> dict[str, int]:
        # A stream that first appears after a wait of the host comes after what the host waited for.
        if stream not in self._clocks:
            self._clocks[stream] = dict(self._clocks.get(HOST, {}))
        return self._clocks[stream]


def _join(clock: dict[str, int], other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """A released buffer's tensor, and what must be finished before its memory is free."""

    name: str
    clock: Clock
    tensor: Tensor


class Reuse:
    """Released tensors of one rank on their way back to the allocator."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._clocks = Clocks()
        self._kept: dict[str, list[_Kept]] = {}

    def issue(self, op: Op) -> None:
        """An op, or a wait, was issued; of a release, after its memory came here."""
        self._clocks.issue(op)
        if isinstance(op, ops.Wait):
            self._give_back()

    def join(self, pending: Collection[str]) -> None:
        """A joint was issued: see ``Streams.join``."""
        self._clocks.join(pending)
        self._give_back()

    def keep(self, name: str, tensor: Tensor, taken_on: str, released_on: str) -> None:
        """Take a released buffer's memory; its last uses are ordered before the next op of ``released_on``."""
        if name in self._ordered:
            clock = self._clocks.clock(released_on)
            self._kept.setdefault(taken_on, []).append(_Kept(name=name, clock=clock, tensor=tensor))
        else:
            # Nothing in the program says when: the allocator asks the device.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tensor.untyped_storage().resize_(0)

    def take_back(self, name: str) -> bool:
        """Whether a released buffer still has its memory, which it then keeps: it begins anew, after its release."""
        for kept in self._kept.values():
            for one in kept:
                if one.name == name:
                    kept.remove(one)
                    return True
        return False

    @property
    def kept_bytes(self) -> int:
        """Bytes that were released and that no stream may use yet."""
        return sum(one.tensor.nbytes for kept in self._kept.values() for one in kept)

    @cached_property
    def _ordered(self) -> frozenset[str]:
        return buffers_reused_in_order(self._program)

    def _give_back(self) -> None:
        for stream, kept in self._kept.items():
            still: list[_Kept] = []
            for one in kept:
                if self._clocks.is_after(stream, one.clock):
                    one.tensor.untyped_storage().resize_(0)
                else:
                    still.append(one)
            kept[:] = still


def buffers_reused_in_order(program: Program) -> frozenset[str]:
    """Buffers that one stream takes and another releases, where a wait follows that orders the first after the second.

    The last releases of a section need no such wait, for the joint orders everything.
    """
    found: set[str] = set()
    for section in program.sections:
        found |= _reused_in_order(section)
    return frozenset(found)


def _reused_in_order(section: Section) -> set[str]:
    found: set[str] = set()
    clocks = Clocks()
    taken_on: dict[str, str] = {}
    released: list[tuple[str, str, Clock]] = []
    for op in section.body:
        match op:
            case ops.Alloc():
                taken_on[op.buffer] = op.stream
            case ops.Release() if taken_on.get(op.buffer, op.stream) != op.stream:
                released.append((op.buffer, taken_on[op.buffer], clocks.clock(op.stream)))
            case _:
                pass
        clocks.issue(op)
        if isinstance(op, ops.Wait):
            found |= {name for name, stream, clock in released if clocks.is_after(stream, clock)}
            released = [one for one in released if one[0] not in found]
    return found
