"""Planned memory: no two buffers that may be live at once share a byte of their space's arena (Z106).

It trusts nobody's account of when buffers live. A section is read once, with a clock for every stream, and each byte
of an arena remembers who had it last: whoever begins there must come after that one's end. This is enough, for the one
before had to come after the end of those who had the byte earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.mesh import HOST
from zeroir.ir.program import Program, Section
from zeroir.verify.context import Findings
from zeroir.verify.crossing import Crossing, crossings
from zeroir.verify.intervals import IntervalMap

_NOBODY = -1


def check_arenas(program: Program, findings: Findings) -> None:
    """Check every section of a planned program; a program without offsets has nothing to check."""
    planned = {
        buffer.name: (buffer, buffer.offset)
        for buffer in program.buffers
        if buffer.offset is not None
    }
    if not planned:
        return
    ways = crossings(program)
    for section in program.sections:
        for crossing in ways[section.name]:
            _Tenants(program, section, planned, findings).run(crossing)


@dataclass(slots=True)
class _Tenant:
    """Who has, or had, some bytes: since which line, and which op of which stream ended it."""

    name: str
    line: int
    stream: int = _NOBODY
    position: int = 0


class _Tenants:
    """One section: who had each byte of each arena last."""

    def __init__(
        self,
        program: Program,
        section: Section,
        planned: dict[str, tuple[Buffer, int]],
        findings: Findings,
    ) -> None:
        self.section = section
        self.planned = planned
        self.findings = findings
        self.number = {stream.name: at for at, stream in enumerate(program.streams)}
        width = len(self.number)
        # done[s][r]: how many ops of stream r are over before the next op of stream s begins.
        self.done = [[0] * width for _ in range(width)]
        self.signals: dict[str, list[int]] = {}
        self.tenants: list[_Tenant] = []
        self.current: dict[str, int] = {}
        self.arenas: dict[Space, IntervalMap[int]] = {}
        for space in Space:
            stop = max(
                (at + b.size_bytes for b, at in planned.values() if b.space is space), default=0
            )
            self.arenas[space] = IntervalMap(stop, _NOBODY)

    def run(self, crossing: Crossing) -> None:
        """Check the section for one way to come to it."""
        for pending in self.section.entry.pending:
            stream = self.number[pending.stream]
            self.done[stream][stream] += 1
            clock = [0] * len(self.done)
            clock[stream] = self.done[stream][stream]
            self.signals[pending.event] = clock
            carried = crossing.get(pending.event)
            for name in () if carried is None else carried.effects.frees:
                self._move_in(name, stream, -1)
                self._move_out(name, stream)
        for name in self.section.entry.live:
            self._move_in(name, None, -1)
        for line, op in enumerate(self.section.body):
            if isinstance(op, ops.Wait):
                self._wait(op)
                continue
            stream = self.number[op.stream]
            if isinstance(op, ops.Alloc):
                self._move_in(op.buffer, stream, line)
            self.done[stream][stream] += 1
            if isinstance(op, ops.Release):
                self._move_out(op.buffer, stream)
            if op.event is not None:
                self.signals[op.event] = list(self.done[stream])

    def _wait(self, op: ops.Wait) -> None:
        clock = self.signals[op.waited]
        for own in self.done if op.on == HOST else [self.done[self.number[op.on]]]:
            own[:] = map(max, own, clock)

    def _move_in(self, name: str, stream: int | None, line: int) -> None:
        buffer, start = self.planned[name]
        arena, stop = self.arenas[buffer.space], start + buffer.size_bytes
        for _, _, before in arena.read(start, stop):
            if before != _NOBODY and not self._is_over(self.tenants[before], stream):
                self._report(name, self.tenants[before], line)
                break
        self.current[name] = len(self.tenants)
        arena.write(start, stop, len(self.tenants))
        self.tenants.append(_Tenant(name, line))

    def _move_out(self, name: str, stream: int) -> None:
        tenant = self.tenants[self.current.pop(name)]
        tenant.stream, tenant.position = stream, self.done[stream][stream]

    def _is_over(self, tenant: _Tenant, stream: int | None) -> bool:
        """Whether somebody's time was surely over when the next op of the stream begins; None: at the entry."""
        if tenant.stream == _NOBODY or stream is None:
            return False
        return self.done[stream][tenant.stream] >= tenant.position

    def _report(self, name: str, other: _Tenant, line: int) -> None:
        buffer, start = self.planned[name]
        theirs, there = self.planned[other.name]
        low, high = max(start, there), min(start + buffer.size_bytes, there + theirs.size_bytes)
        since = "from the entry on" if other.line < 0 else f"from @{other.line} on"
        self.findings.add(
            "Z106",
            f"%{name} and %{other.name}, which may still be live {since}, both stand in bytes [{low}:{high}] of the "
            f"{buffer.space} memory",
            section=self.section,
            line=None if line < 0 else line,
            buffers=(name, other.name),
        )
