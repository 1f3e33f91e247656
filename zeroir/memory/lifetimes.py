"""Lifetimes of temporary buffers by happens-before: from the op that begins one until each stream knows its end.

A stream may use the memory of a released buffer once it is ordered after the release: the release's own stream
immediately, another stream after a wait for it. Program order is not enough, because streams run ahead or lag behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from zeroir.ir import ops
from zeroir.ir.analysis.happens_before import StreamClocks
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Every life of every temporary buffer, in the order of their beginnings: the n-th of each list is the n-th life's.

    Moments count the program's ops, section after section: the moment of an op is that of its section in ``starts``,
    plus 1, plus its index. A life is live from ``firsts`` to before ``lasts`` if ops take effect in program order. A
    life that extends into a section begins at the section's start, and one that extends beyond it ends with it.
    ``streams`` are the numbers, in the program, of the streams that begin them. ``free_from[stream]`` is the moment
    from which on buffers that the stream begins come after the life's end. ``stop`` is the end of the last section.

    If the scratch memory of ops is included, the lives of ``scratch`` are those of ops and not of buffers: the name is
    empty, and they last from the op's moment to the next.
    """

    buffers: list[str] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    free_from: list[list[int]]
    starts: list[int] = field(default_factory=list)
    stop: int

    @classmethod
    def of(cls, program: Program, has_scratch: Callable[[Op], bool] | None = None) -> Lifetimes:
        """Find the lifetimes, including those of the scratch memory of ops for which ``has_scratch`` is True."""
        lifetimes = cls(
            free_from=[[] for _ in program.streams],
            stop=sum(len(section.body) + 2 for section in program.sections),
        )
        crossing = _pending_releases(program)
        start = 0
        for section in program.sections:
            lifetimes.starts.append(start)
            _Sweep(lifetimes, program, section, start, crossing).run(has_scratch)
            start += len(section.body) + 2
        return lifetimes

    def is_before(self, a: int, b: int) -> bool:
        """Return whether the first life has certainly ended when the second begins."""
        return self.free_from[self.streams[b]][a] <= self.firsts[b]

    def place(self, program: Program, moment: int) -> tuple[Section, int]:
        """Return the section of a moment, and the index of its op: -1 at the section's start."""
        number = max(i for i, start in enumerate(self.starts) if start <= moment)
        return program.sections[number], moment - self.starts[number] - 1


def _pending_releases(program: Program) -> Mapping[str, Sequence[str]]:
    """Return the buffers whose release signals an event pending at a boundary; they live until a wait for it."""
    pending = {p.event for section in program.sections for p in section.exit.pending}
    buffers: dict[str, list[str]] = {}
    for op in program.ops() if pending else ():
        if isinstance(op, ops.Release) and op.event in pending:
            buffers.setdefault(op.event, []).append(op.buffer)
    return buffers


class _Sweep:
    """One pass over a section."""

    def __init__(
        self,
        lifetimes: Lifetimes,
        program: Program,
        section: Section,
        start: int,
        crossing: Mapping[str, Sequence[str]],
    ) -> None:
        self.lifetimes = lifetimes
        self.section = section
        self.start = start
        self.stop = start + len(section.body) + 1
        self.clocks = StreamClocks(stream.name for stream in program.streams)
        width = len(program.streams)
        # Lives that ended, by the stream of their end, with that stream's count then; and for each pair of streams how
        # many of them the first knows of.
        self.ended: list[list[int]] = [[] for _ in range(width)]
        self.counts: list[list[int]] = [[] for _ in range(width)]
        self.learned = [[0] * width for _ in range(width)]
        self.live: dict[str, int] = {}
        self.crossing = crossing

    def run(self, has_scratch: Callable[[Op], bool] | None) -> None:
        # Room for the most lives that the section can have; the rest is cut off at the end.
        most = (
            len(self.section.body)
            + len(self.section.entry.live)
            + sum(map(len, self.crossing.values()))
        )
        for free in self.lifetimes.free_from:
            free.extend([self.stop] * most)
        self._enter()
        clocks, live, numbers = self.clocks, self.live, self.clocks.numbers
        moment = self.start
        for op in self.section.body:
            moment += 1
            if isinstance(op, ops.Wait):
                for stream, other, count in clocks.wait(op.waited, op.on):
                    self._learn(stream, other, count, moment)
                continue
            stream = numbers[op.stream]
            clocks.issue(stream, op.event)
            if isinstance(op, ops.Alloc):
                if op.buffer not in live:
                    live[op.buffer] = self._begin(op.buffer, stream, moment)
            elif isinstance(op, ops.Release):
                if op.buffer in live:
                    self._end(live.pop(op.buffer), stream, moment)
            elif has_scratch is not None and has_scratch(op):
                self._end(self._begin("", stream, moment), stream, moment)
        for free in self.lifetimes.free_from:
            del free[len(self.lifetimes.buffers) :]

    def _enter(self) -> None:
        entry = self.section.entry
        for name in entry.live:
            self.live[name] = self._begin(name, 0, self.start)
        for pending in entry.pending:
            stream, _ = self.clocks.enter(pending)
            for name in self.crossing.get(pending.event, ()):
                if name in entry.live:
                    continue  # It has begun again since.
                life = self._begin(name, stream, self.start)
                self._end(life, stream, self.start)
                # Those that cross on one stream end one after the other; where they began, it is known which of them
                # were live at once.
                self.lifetimes.free_from[stream][life] = self.start

    def _begin(self, name: str, stream: int, moment: int) -> int:
        lifetimes = self.lifetimes
        lifetimes.buffers.append(name)
        lifetimes.streams.append(stream)
        lifetimes.firsts.append(moment)
        lifetimes.lasts.append(self.stop)
        return len(lifetimes.buffers) - 1

    def _end(self, life: int, stream: int, moment: int) -> None:
        self.lifetimes.lasts[life] = moment
        self.lifetimes.free_from[stream][life] = moment + 1
        self.ended[stream].append(life)
        self.counts[stream].append(self.clocks.done[stream][stream])

    def _learn(self, stream: int, other: int, count: int, moment: int) -> None:
        """Record that from now on the stream is ordered after the first ``count`` ops of the other."""
        ended, counts = self.ended[other], self.counts[other]
        free = self.lifetimes.free_from[stream]
        at, number = self.learned[stream][other], len(ended)
        while at < number and counts[at] <= count:
            free[ended[at]] = moment
            at += 1
        self.learned[stream][other] = at
