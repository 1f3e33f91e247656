"""Happens-before by vector clocks: which ops of a section are certainly done before another one starts.

A stream runs its ops in the order of the section's lines. A wait orders a stream, or the host and with it every stream,
after the op that signals the event. Nothing else orders ops of two streams.

Passes, memory and costs have their own happens-before, which the verifier does not use: an error there would affect a
pass and its proof in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.mesh import HOST
from zeroir.ir.program import Program, Section

ENTRY = -1
"""The number of everything that is done when the section starts."""


@dataclass(slots=True)
class OpOnStream:
    """An op on its stream: its position among the ops there, and its line.

    An op that is pending at the entry of the section has the line -1 and no ``op``.
    """

    stream: int
    position: int
    line: int
    op: ops.IssuedOp | None


class HappensBefore:
    """The order of the ops of one section, which are issued line by line; each gets a number, counted from 0."""

    def __init__(self, program: Program, section: Section) -> None:
        self.streams = {stream.name: index for index, stream in enumerate(program.streams)}
        self.issued: list[OpOnStream] = []
        self.signallers: dict[str, int] = {}
        """The number of the op that signals each event."""
        width = len(self.streams)
        # done[s][r]: how many ops of stream r are done before the next op of stream s starts.
        self._done = [[0] * width for _ in range(width)]
        self._done_at_event: dict[str, list[int]] = {}
        for pending in section.entry.pending:
            self._issue(self.streams[pending.stream], -1, None, pending.event)

    def issue(self, line: int, op: ops.IssuedOp) -> int:
        """Append an op to its stream and let it signal its event; return the op's number."""
        return self._issue(self.streams[op.stream], line, op, op.event)

    def _issue(self, stream: int, line: int, op: ops.IssuedOp | None, event: str | None) -> int:
        done = self._done[stream]
        number = len(self.issued)
        self.issued.append(OpOnStream(stream, done[stream], line, op))
        done[stream] += 1
        if event is not None:
            self._done_at_event[event] = list(done)
            self.signallers[event] = number
        return number

    def wait(self, op: ops.Wait) -> bool:
        """Order a stream, or all, after an event; return False if no op before the wait signals it."""
        at_event = self._done_at_event.get(op.waited)
        if at_event is None:
            return False
        waiting = self._done if op.on == HOST else [self._done[self.streams[op.on]]]
        for done in waiting:
            done[:] = map(max, done, at_event)
        return True

    def clock(self, stream: int) -> tuple[int, ...]:
        """Return how many ops of each stream are done before the next op of a stream starts."""
        return tuple(self._done[stream])

    def is_before(self, number: int, stream: int) -> bool:
        """Return whether an issued op is done before the next op of a stream starts."""
        if number == ENTRY:
            return True
        issued = self.issued[number]
        return self._done[stream][issued.stream] > issued.position
