"""The waits of a program, derived from the effects of its ops and from its bounds.

A pass places ops in program order, chooses the stream of each, and states bounds. It neither sees nor creates waits:
the pass manager removes them before a pass and derives them after it. ``derive_waits`` treats each section as if it
were sequential, and lets an op wait for these earlier ops of other streams:

* ops that access a common region, where one of the two writes (allocating and releasing count as writing the whole
  buffer);
* for a collective, the last one on its communicator, and on each communicator over another axis;
* for an ``alloc``, the ops that the program's bounds name (``zeroir.ir.bounds``).

A wait is created only where nothing yet orders the two ops. Events are numbered in the order in which they are
signalled.

An ``alloc`` takes no time, but a buffer that begins before a wait may be live at the same time as the buffers of the
ops that the wait is for. So each alloc is delayed until an op of its stream first uses its buffer, and follows the
waits of that op.

An event that is pending at the exit of a section keeps its name. The ops of all sections that signal an event which is
pending at the entry count as earlier ops there, because each may still be running. Where no op signals it, the accesses
of its op are unknown, and the waits for it are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, assert_never

from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.analysis.happens_before import Clock, StreamClocks
from zeroir.ir.bounds import (
    AheadBound,
    BehindBound,
    BoundKind,
    LiveBound,
)
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Alloc, Op, Release, Wait
from zeroir.ir.program import Program, Section
from zeroir.passes.common import rewrite
from zeroir.passes.common.bounded_buffers import bounded_buffers, groups
from zeroir.passes.common.conflicts import Touch, touches


def without_waits(program: Program) -> Program:
    """Return the program without the waits and events of its sections, except events, and waits, that cross a boundary.

    Of the latter, waits for events that ops of the program signal are also removed.
    """
    crossing = {p.event for section in program.sections for p in section.entry.pending}
    signalled = (
        {op.event for op in program.ops() if not isinstance(op, Wait)} if crossing else set()
    )
    return rewrite.map_sections(program, lambda section: _without_waits(section, signalled))


def _without_waits(section: Section, signalled: Set[str | None]) -> Section:
    entering = {pending.event for pending in section.entry.pending} - signalled
    leaving = {pending.event for pending in section.exit.pending}
    body: list[Op] = []
    for op in section.body:
        if isinstance(op, Wait):
            if op.waited in entering:
                body.append(op)
        elif op.event is None or op.event in leaving:
            body.append(op)
        else:
            body.append(replace(op, event=None))
    return replace(section, body=tuple(body))


def derive_waits(program: Program) -> Program:
    """Return the program with the waits and events that its sections need, instead of its old ones."""
    program = without_waits(program)
    kinds = bounded_buffers(program.buffers, program.ops()) if program.bounds else {}
    crossing = _crossing_touches(program)
    return rewrite.map_sections(
        program, lambda section: _Derivation(program, section, kinds, crossing).run()
    )


def _crossing_touches(program: Program) -> Mapping[str, Sequence[Touch]]:
    """Return the elements accessed by the ops that signal each event that is pending at a boundary."""
    crossing: dict[str, list[Touch]] = {
        pending.event: [] for section in program.sections for pending in section.entry.pending
    }
    for op in program.ops() if crossing else ():
        if not isinstance(op, Wait) and op.event in crossing:
            crossing[op.event] += touches(effects(op), program)
    return crossing


class _EffectsOfOp(NamedTuple):
    """An op, its effects, and the elements that it accesses."""

    op: Op
    effects: Effects
    touched: list[Touch]


def _with_held_allocs(section: Section, program: Program) -> Iterator[Wait | list[_EffectsOfOp]]:
    """Yield the ops in order, each after the allocs that are delayed for it."""
    leaving = {pending.event for pending in section.exit.pending}
    together: list[Wait | list[_EffectsOfOp]] = []
    touching: dict[str, list[_EffectsOfOp]] = {}
    for op in reversed(section.body):
        if isinstance(op, Wait):
            together.append(op)
            continue
        effect = effects(op)
        step = _EffectsOfOp(op, effect, touches(effect, program))
        if isinstance(op, Alloc) and op.event not in leaving:
            first = touching.get(op.buffer)
            if first is not None and first[-1].effects.stream == op.stream:
                first.insert(0, step)
                continue
        group = [step]
        together.append(group)
        for touch in step.touched:
            touching[touch[0]] = group
    return reversed(together)


@dataclass(slots=True)
class _PlacedOp:
    """An op already placed, or one that is pending at the entry; ``clock`` counts the ops done when it ends."""

    op: Op | None
    stream: int
    place: int
    clock: Clock
    event: str | None


@dataclass(slots=True)
class _Accesses:
    """The ops that users of a buffer wait for: by start and stop its writers, and the last reader of each stream."""

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    reads: dict[tuple[int, int, int], int] = field(default_factory=dict)


class _BoundedReleases:
    """The releases of one kind of buffer so far, with the ranks of their groups."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._all: list[tuple[int, int]] = []
        # For each stream that begins such buffers, the releases that it has not waited for: it waits for each once.
        self._unordered: dict[int, list[tuple[int, int]]] = {}

    def add(self, group: int, index: int) -> None:
        """Add a release, by its index among the issued ops."""
        rank = self._ranks.setdefault(group, len(self._ranks))
        for releases in (self._all, *self._unordered.values()):
            releases.append((rank, index))

    def needed(self, stream: int, ahead: int) -> list[int]:
        """Return the releases that the stream must follow from now on: those of all groups but the last ``ahead``."""
        limit = len(self._ranks) - ahead
        releases = self._unordered.get(stream, self._all)
        self._unordered[stream] = [release for release in releases if release[0] >= limit]
        return [index for rank, index in releases if rank < limit]


class _Derivation:
    """The waits of one section."""

    def __init__(
        self,
        program: Program,
        section: Section,
        kinds: Mapping[str, BoundKind],
        crossing: Mapping[str, Sequence[Touch]],
    ) -> None:
        self.program = program
        self.crossing = crossing
        self.section = section
        self.clocks = StreamClocks(stream.name for stream in program.streams)
        self.issued: list[_PlacedOp] = []
        self.body: list[Wait | int] = []
        """Waits, and every other op as its index in ``issued``."""
        self.accesses: dict[str, _Accesses] = {}
        self.signals: dict[str, int] = {}
        self.last_of_comm: dict[str, int] = {}
        self.kept_waits: dict[int, list[int]] = {}
        """For each stream the pending ops that its next op waits for."""
        self.kinds = kinds
        self.bounds = {bound.kind: bound for bound in program.bounds}
        self.groups: Iterator[int] = iter(groups(section.body, kinds).values() if kinds else ())
        """The groups of the later releases of bounded buffers, in order."""
        self.releases = {kind: _BoundedReleases() for kind in self.bounds}
        self.open: dict[BoundKind, int] = dict.fromkeys(self.bounds, 0)
        """How many buffers of each kind have begun and are released later."""
        self.last_op: dict[int, int] = {}
        """For each stream its last op that is not an alloc."""

    def run(self) -> Section:
        entry = self.section.entry
        for pending in entry.pending:
            stream, _ = self.clocks.enter(pending)
            index = self._append(None, stream, pending.event)
            self._record(self.crossing[pending.event], index)
            for holding in entry.holdings:
                if holding.after == pending.event:
                    region = holding.region
                    self._record([(region.buffer, region.offset, region.stop, True)], index)
        for group in _with_held_allocs(self.section, self.program):
            if isinstance(group, Wait):
                self._keep_wait(group)
            else:
                self._place(group)
        return replace(self.section, body=self._named())

    # ------------------------------------------------------------------------------------------------ placing ops

    def _place(self, group: Sequence[_EffectsOfOp]) -> None:
        """Place an op and the allocs delayed for it, after everything that any of them must wait for."""
        stream = self.clocks.numbers[group[-1].effects.stream]
        needed = set(self.kept_waits.pop(stream, ()))
        for step in group:
            self._add_needed(step, stream, needed)
        for index in sorted(needed, reverse=True):
            if not self._is_ordered(index, stream):
                self._wait(index, stream)
        for op, effect, touched in group:
            self.clocks.issue(stream)
            index = self._append(op, stream, op.event if not isinstance(op, Wait) else None)
            self.body.append(index)
            self._record(touched, index)
            if effect.comm is not None:
                self.last_of_comm[effect.comm] = index
            if not isinstance(op, Alloc):
                self.last_op[stream] = index
            if isinstance(op, Release) and op.buffer in self.kinds:
                number = next(self.groups)
                if self.kinds[op.buffer] in self.releases:
                    self.releases[self.kinds[op.buffer]].add(number, index)
                    self.open[self.kinds[op.buffer]] -= 1

    def _append(self, op: Op | None, stream: int, event: str | None) -> int:
        clock = self.clocks.done[stream].copy()
        self.issued.append(_PlacedOp(op, stream, clock[stream], clock, event))
        if event is not None:
            self.signals[event] = len(self.issued) - 1
        return len(self.issued) - 1

    def _add_needed(self, step: _EffectsOfOp, stream: int, needed: set[int]) -> None:
        """Add the ops after which this one must run, except those that conflict but are known to be done."""
        issued, clock = self.issued, self.clocks.done[stream]
        for buffer, start, stop, is_write in step.touched:
            accesses = self.accesses.get(buffer)
            if accesses is None:
                continue
            for first, last, index in accesses.writes:
                if first < stop and start < last:
                    writer = issued[index]
                    if clock[writer.stream] < writer.place:
                        needed.add(index)
            for (first, last, reading), index in accesses.reads.items() if is_write else ():
                if first < stop and start < last and clock[reading] < issued[index].place:
                    needed.add(index)
        comm = step.effects.comm
        if comm is not None:
            axis = self.program.comm_by_name[comm].axis
            needed.update(
                index
                for earlier, index in self.last_of_comm.items()
                if earlier == comm or self.program.comm_by_name[earlier].axis != axis
            )
        if isinstance(step.op, Alloc) and step.op.buffer in self.kinds:
            kind = self.kinds[step.op.buffer]
            needed.update(self._bounding(kind, stream))
            if kind in self.open:
                self.open[kind] += 1

    def _bounding(self, kind: BoundKind, stream: int) -> Sequence[int]:
        """Return the ops after which a buffer of this kind may begin."""
        match self.bounds.get(kind):
            case None:
                return ()
            case AheadBound(ahead=ahead):
                return self.releases[kind].needed(stream, ahead)
            case BehindBound(behind=behind):
                last = self.last_op.get(self.clocks.numbers[behind])
                return () if last is None else (last,)
            case LiveBound(live=live):
                return self.releases[kind].needed(stream, max(live - 1 - self.open[kind], 0))
            case bound:
                assert_never(bound)

    def _record(self, touched: Sequence[Touch], index: int) -> None:
        stream = self.issued[index].stream
        for buffer, start, stop, is_write in touched:
            accesses = self.accesses.get(buffer)
            if accesses is None:
                accesses = self.accesses[buffer] = _Accesses()
            if not is_write:
                # Ops after the last read of a stream are also after its earlier ones.
                accesses.reads[start, stop, stream] = index
                continue
            # An op that follows a write also follows its predecessors, so the accesses that it covers can be discarded.
            if accesses.writes:
                accesses.writes = [
                    write for write in accesses.writes if write[0] < start or stop < write[1]
                ]
            if accesses.reads:
                accesses.reads = {
                    read: at
                    for read, at in accesses.reads.items()
                    if read[0] < start or stop < read[1]
                }
            accesses.writes.append((start, stop, index))

    # ------------------------------------------------------------------------------------------------------ waits

    def _is_ordered(self, index: int, stream: int) -> bool:
        before = self.issued[index]
        return self.clocks.done[stream][before.stream] >= before.place

    def _keep_wait(self, wait: Wait) -> None:
        index = self.signals.get(wait.waited)
        if index is None:
            return
        if wait.on == HOST:
            self.body.append(wait)
            for stream in range(len(self.clocks.done)):
                self.clocks.follow(stream, self.issued[index].clock)
        else:
            self.kept_waits.setdefault(self.clocks.numbers[wait.on], []).append(index)

    def _wait(self, index: int, stream: int) -> None:
        before = self.issued[index]
        if before.event is None:
            before.event = f"#{index}"
        self.body.append(Wait(waited=before.event, on=self.program.streams[stream].name))
        self.clocks.follow(stream, before.clock)

    # ------------------------------------------------------------------------------------------------------ names

    def _named(self) -> tuple[Op, ...]:
        """Return the body with events numbered in order of signalling, and only those that an op waits for."""
        fixed = {p.event for p in (*self.section.entry.pending, *self.section.exit.pending)}
        waited = {op.waited for op in self.body if isinstance(op, Wait)}
        free = (number for number in map(str, count()) if number not in fixed)
        names: dict[str, str] = {name: name for name in fixed}
        body: list[Op] = []
        for item in self.body:
            if isinstance(item, Wait):
                body.append(replace(item, waited=names[item.waited]))
                continue
            placed = self.issued[item]
            op, event = placed.op, placed.event
            assert op is not None
            assert not isinstance(op, Wait)
            if event is not None and event not in names and event in waited:
                names[event] = next(free)
            name = None if event is None else names.get(event)
            body.append(op if op.event == name else replace(op, event=name))
        return tuple(body)
