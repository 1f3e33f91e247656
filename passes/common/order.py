"""Waits from effects: order what must be ordered between streams, and nothing else.

A pass puts ops where they belong in program order and says on which stream each runs. ``synchronise`` then looks at
their effects alone, as if the section were sequential: wherever two ops on different streams touch one region, at
least one of them writing (allocating and releasing count as writing the whole buffer), the later must wait for the
earlier. Collectives on one communicator, and on communicators over different axes, are ordered in the same way.

A wait is added only where nothing yet orders the two, and a wait that orders nothing (its event is gone, what it
orders is ordered anyway, or nothing follows on its stream) is taken out. Waits that a pass put in on purpose, to bound
how far a stream runs ahead, therefore stay as long as they do something. Events are numbered anew in the order in which
they are signalled. A pass that moves ops begins with ``unordered``, so that no wait is left of an order that was.

An ``alloc`` takes no time, but a buffer that begins before a wait may meet all that the wait is for. So each is held
back until an op of its stream first touches its buffer, and comes after whatever that op waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zeroir.ir.effects import Effects, effects
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Alloc, Op, Wait
from zeroir.ir.program import Program, Section
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touch, touches

Clock = dict[str, int]
"""For each stream, how many of its ops have surely finished."""


def synchronise(program: Program) -> Program:
    """The program with the waits and events that its sections need."""
    return rewrite.map_sections(program, lambda section: _Orderer(program, section).run())


def unordered(program: Program) -> Program:
    """The program without the waits of its sections, but for those on events that are pending at their entry."""
    return rewrite.map_sections(program, without_waits)


def without_waits(section: Section) -> Section:
    """See ``unordered``, for one section."""
    pending = {p.event for p in section.entry.pending}
    body = (op for op in section.body if not isinstance(op, Wait) or op.waited in pending)
    return replace(section, body=tuple(body))


class _Step(NamedTuple):
    """An op, what it does, and what it touches."""

    op: Op
    effect: Effects
    touched: list[Touch]


def _groups(section: Section, program: Program) -> Iterator[Wait | list[_Step]]:
    """The ops in order, each behind the allocs that are held back for it."""
    waited = {op.waited for op in section.body if isinstance(op, Wait)}
    waited |= {pending.event for pending in section.exit.pending}
    found: list[Wait | list[_Step]] = []
    touching: dict[str, list[_Step]] = {}
    for op in reversed(section.body):
        if isinstance(op, Wait):
            found.append(op)
            continue
        effect = effects(op)
        step = _Step(op, effect, touches(effect, program))
        if isinstance(op, Alloc) and op.event not in waited:
            first = touching.get(op.buffer)
            if first is not None and first[-1].effect.stream == op.stream:
                first.insert(0, step)
                continue
        group = [step]
        found.append(group)
        for touch in step.touched:
            touching[touch[0]] = group
    return reversed(found)


@dataclass(slots=True)
class _Issued:
    """An op already placed, or an op before the section that signals a pending event; ``count`` is its stream's."""

    op: Op | None
    stream: str
    count: int
    clock: Clock
    event: str | None


@dataclass(slots=True)
class _Accesses:
    """Who touched a buffer and is to be waited for: by start and stop, who changed it, and the last of each stream."""

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    reads: dict[tuple[int, int, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Orderer:
    program: Program
    section: Section
    issued: list[_Issued] = field(default_factory=list)
    body: list[Op | int] = field(default_factory=list)
    """Waits as they are, every other op as its index in ``issued``."""
    clocks: dict[str, Clock] = field(default_factory=dict)
    accesses: dict[str, _Accesses] = field(default_factory=dict)
    signals: dict[str, int] = field(default_factory=dict)
    last_of_comm: dict[str, int] = field(default_factory=dict)
    idle_waits: dict[str, list[int]] = field(default_factory=dict)
    """Positions in ``body`` of the waits on each stream since its last op."""

    def run(self) -> Section:
        for pending in self.section.entry.pending:
            index = self._issue(None, pending.stream, pending.event)
            for holding in self.section.entry.holdings:
                if holding.after == pending.event:
                    region = holding.region
                    self._record([(region.buffer, region.offset, region.stop, True)], index)
        for group in _groups(self.section, self.program):
            if isinstance(group, Wait):
                self._keep_wait(group)
            else:
                self._place(group)
        for position in (p for waits in self.idle_waits.values() for p in waits):
            self.body[position] = _REMOVED
        return replace(self.section, body=self._named())

    # ------------------------------------------------------------------------------------------------ placing ops

    def _place(self, group: Sequence[_Step]) -> None:
        """Place an op and the allocs held back for it, behind what any of them must wait for."""
        stream = group[-1].effect.stream
        clock = self._clock(stream)
        needed = self._needed(group[-1], clock)
        for step in group[:-1]:
            needed |= self._needed(step, clock)
        for index in sorted(needed, reverse=True):
            if not self._is_ordered(index, stream):
                self._wait(index, stream)
        for op, effect, touched in group:
            index = self._issue(op, stream, effect.signals[0] if effect.signals else None)
            self.body.append(index)
            self._record(touched, index)
            if effect.comm is not None:
                self.last_of_comm[effect.comm] = index
        self.idle_waits.pop(stream, None)

    def _issue(self, op: Op | None, stream: str, event: str | None) -> int:
        clock = self._clock(stream)
        clock[stream] = count = clock.get(stream, 0) + 1
        self.issued.append(_Issued(op, stream, count, clock.copy(), event))
        if event is not None:
            self.signals[event] = len(self.issued) - 1
        return len(self.issued) - 1

    def _needed(self, step: _Step, clock: Clock) -> set[int]:
        """Whom an op must come after, but for those that its stream's clock knows of; of collectives all."""
        found: set[int] = set()
        issued = self.issued
        for buffer, start, stop, is_write in step.touched:
            known = self.accesses.get(buffer)
            if known is None:
                continue
            for first, last, index in known.writes:
                if first < stop and start < last:
                    before = issued[index]
                    if clock.get(before.stream, 0) < before.count:
                        found.add(index)
            for (first, last, stream), index in known.reads.items() if is_write else ():
                if first < stop and start < last and clock.get(stream, 0) < issued[index].count:
                    found.add(index)
        comm = step.effect.comm
        if comm is not None:
            axis = self.program.comm_by_name[comm].axis
            found.update(
                index
                for other, index in self.last_of_comm.items()
                if other == comm or self.program.comm_by_name[other].axis != axis
            )
        return found

    def _record(self, touched: Sequence[Touch], index: int) -> None:
        stream = self.issued[index].stream
        for buffer, start, stop, is_write in touched:
            known = self.accesses.get(buffer)
            if known is None:
                known = self.accesses[buffer] = _Accesses()
            if not is_write:
                # Whoever comes after the last read of a stream comes after those before it.
                known.reads[start, stop, stream] = index
                continue
            # Whoever comes after a write comes after all that it came after: what it covers can be forgotten.
            if known.writes:
                known.writes = [one for one in known.writes if one[0] < start or stop < one[1]]
            if known.reads:
                known.reads = {
                    one: at for one, at in known.reads.items() if one[0] < start or stop < one[1]
                }
            known.writes.append((start, stop, index))

    # ------------------------------------------------------------------------------------------------------ waits

    def _clock(self, stream: str) -> Clock:
        # A stream that first appears after a wait of the host comes after what the host waited for.
        if stream not in self.clocks:
            self.clocks[stream] = dict(self.clocks.get(HOST, {}))
        return self.clocks[stream]

    def _is_ordered(self, index: int, stream: str) -> bool:
        before = self.issued[index]
        return self._clock(stream).get(before.stream, 0) >= before.count

    def _keep_wait(self, wait: Wait) -> None:
        index = self.signals.get(wait.waited)
        if index is None:
            return
        if wait.on == HOST:
            self.body.append(wait)
            self._clock(HOST)
            for clock in self.clocks.values():
                _join(clock, self.issued[index].clock)
        elif not self._is_ordered(index, wait.on):
            self._wait(index, wait.on)

    def _wait(self, index: int, stream: str) -> None:
        before = self.issued[index]
        if before.event is None:
            before.event = f"#{index}"
            self.signals[before.event] = index
        waits = self.idle_waits.setdefault(stream, [])
        for position in list(waits):
            earlier = self.body[position]
            assert isinstance(earlier, Wait)  # Only waits are noted as idle.
            signal = self.issued[self.signals[earlier.waited]]
            if before.clock.get(signal.stream, 0) >= signal.count:
                waits.remove(position)
                self.body[position] = _REMOVED
        waits.append(len(self.body))
        self.body.append(Wait(waited=before.event, on=stream))
        _join(self._clock(stream), before.clock)

    # ------------------------------------------------------------------------------------------------------ names

    def _named(self) -> tuple[Op, ...]:
        """The body with events numbered in order of signalling, and only those that somebody waits for."""
        fixed = {p.event for p in (*self.section.entry.pending, *self.section.exit.pending)}
        waited = {op.waited for op in self.body if isinstance(op, Wait)}
        numbers = (str(number) for number in range(len(self.issued) + len(fixed) + 1))
        free = (number for number in numbers if number not in fixed)
        names: dict[str, str] = {name: name for name in fixed}
        found: list[Op] = []
        for item in self.body:
            if item == _REMOVED:
                continue
            if isinstance(item, Wait):
                found.append(replace(item, waited=names[item.waited]))
                continue
            assert isinstance(item, int)
            placed = self.issued[item]
            op, event = placed.op, placed.event
            assert op is not None
            assert not isinstance(op, Wait)
            if event is not None and event not in names and event in waited:
                names[event] = next(free)
            name = None if event is None else names.get(event)
            found.append(op if op.event == name else replace(op, event=name))
        return tuple(found)


_REMOVED = -1


def _join(clock: Clock, other: Mapping[str, int]) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
