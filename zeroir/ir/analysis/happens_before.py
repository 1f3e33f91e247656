"""Happens-before by vector clocks: the ops that are certainly done when another one starts.

A stream runs its ops in program order. A wait orders a stream, or the host and with it every stream, after the op that
signals its event and after everything that is done when that op is. A boundary between two sections orders every stream
after everything before it, except the ops whose events are pending there. Nothing else orders ops of two streams.

This one is for passes, memory and costs. The verifier has its own, so that it detects errors in this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zeroir.ir.mesh import HOST
from zeroir.ir.program import Pending

Clock = list[int]
"""For each stream, by its number, how many of its ops are certainly done."""


Position = tuple[int, int]
"""An op: the number of its stream, and its position on that stream, from 1. A plain tuple, because there are many."""

NewlyDone = tuple[int, int, int]
"""What a wait adds for a stream: its number, another stream's number, and how many of its ops are certainly done."""


class StreamClocks:
    """The ops that every stream has waited for, while the ops of one or more sections are issued in program order.

    Streams are numbered in the order in which a program declares them.
    """

    __slots__ = ("_signals", "done", "numbers")

    def __init__(self, streams: Iterable[str], pending: Iterable[Pending] = ()) -> None:
        self.numbers = {stream: number for number, stream in enumerate(streams)}
        width = len(self.numbers)
        self.done: list[Clock] = [[0] * width for _ in range(width)]
        """For each stream the ops that are certainly done when its next op starts; of the stream itself all issued."""
        self._signals: dict[str, tuple[int, Clock]] = {}
        for entering in pending:
            self.enter(entering)

    def enter(self, pending: Pending) -> Position:
        """Issue an op that is pending when the section starts: the ops that it waited for were done before."""
        stream = self.numbers[pending.stream]
        count = self.issue(stream)
        clock = [0] * len(self.done)
        clock[stream] = count
        self._signals[pending.event] = (stream, clock)
        return stream, count

    def issue(self, stream: int, event: str | None = None) -> int:
        """Issue an op, which signals the event; return how many ops its stream has issued so far."""
        clock = self.done[stream]
        clock[stream] += 1
        if event is not None:
            self._signals[event] = (stream, clock.copy())
        return clock[stream]

    def signaller(self, event: str) -> Position | None:
        """Return the op that signalled the event; None if it belongs to an earlier step."""
        if event not in self._signals:
            return None
        stream, clock = self._signals[event]
        return stream, clock[stream]

    def wait(self, event: str, on: str) -> list[NewlyDone]:
        """Order a stream, or all of them where the host waits, after an event; return the added ops for each of them.

        An event that nothing has signalled belongs to an earlier step and orders nothing.
        """
        if event not in self._signals:
            return []
        _, clock = self._signals[event]
        if on != HOST:
            return self.follow(self.numbers[on], clock)
        learned: list[NewlyDone] = []
        for stream in range(len(self.done)):
            learned += self.follow(stream, clock)
        return learned

    def follow(self, stream: int, clock: Clock) -> list[NewlyDone]:
        """Order the next op of a stream after all ops that the clock counts; return those new to the stream."""
        own = self.done[stream]
        learned: list[NewlyDone] = []
        for other, count in enumerate(clock):
            if count > own[other] and other != stream:
                own[other] = count
                learned.append((stream, other, count))
        return learned

    def join(self, pending: Collection[str]) -> list[Position]:
        """Pass a boundary; return for each stream the last op after which later ops are ordered, if there is one.

        A stream runs in order, so later ops come after those before its first op that is pending and that no stream has
        waited for.
        """
        clock = [own[stream] for stream, own in enumerate(self.done)]
        self._signals = {event: self._signals[event] for event in pending if event in self._signals}
        for stream, signal in self._signals.values():
            clock[stream] = min(clock[stream], signal[stream] - 1)
        # An op that one stream has waited for, even a pending one, is before the boundary for all of them.
        for stream, own in enumerate(self.done):
            for other, count in enumerate(own):
                if other != stream:
                    clock[other] = max(clock[other], count)
        for stream in range(len(self.done)):
            self.follow(stream, clock)
        return [(stream, count) for stream, count in enumerate(clock) if count]
