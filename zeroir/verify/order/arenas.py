"""Planned memory: no two buffers that may be live at once share a byte of their space's arena (Z106).

This check does not use lifetimes that the memory model computed. It reads each section once, and records for each byte
of an arena the last buffer there: the next buffer there must begin after that one has ended. One buffer per byte is
enough, because that one began after the end of all earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.program import Program, Section
from zeroir.verify.context import Findings
from zeroir.verify.interpreter.intervals import IntervalMap
from zeroir.verify.order.happens_before import HappensBefore
from zeroir.verify.order.pending_events import PendingOps, pending_ops_at_entry


def check_arenas(program: Program, findings: Findings) -> None:
    """Check every section of a planned program; a program without offsets has nothing to check."""
    planned = {
        buffer.name: (buffer, buffer.offset)
        for buffer in program.buffers
        if buffer.offset is not None
    }
    if not planned:
        return
    ways = pending_ops_at_entry(program)
    for section in program.sections:
        for pending_ops in ways[section.name]:
            _ArenaCheck(program, section, planned, findings).run(pending_ops)


@dataclass(slots=True, eq=False)
class _Lifetime:
    """A buffer in its place: the line where it begins (-1: the entry), and the number of the op that ends it."""

    name: str
    line: int
    end: int | None = None


class _ArenaCheck:
    """The check of one section: the last buffer in each byte of each arena."""

    def __init__(
        self,
        program: Program,
        section: Section,
        planned: Mapping[str, tuple[Buffer, int]],
        findings: Findings,
    ) -> None:
        self.section = section
        self.planned = planned
        self.findings = findings
        self.order = HappensBefore(program, section)
        self.live: dict[str, _Lifetime] = {}
        self.arenas: dict[Space, IntervalMap[_Lifetime | None]] = {}
        for space in Space:
            stops = (at + b.size_bytes for b, at in planned.values() if b.space is space)
            self.arenas[space] = IntervalMap(max(stops, default=0), None)

    def run(self, pending_ops: PendingOps) -> None:
        """Check the section for one combination of ops pending at its entry."""
        live = self.section.entry.live
        for pending in self.section.entry.pending:
            carried = pending_ops.get(pending.event)
            for name in () if carried is None else carried.effects.frees:
                if name in live:
                    continue  # It has begun again since, in a section that was checked.
                # Ops after the later one of a stream are also after the earlier ones. Where these began, it is checked
                # whether they were live at once.
                self._begin(name, self.order.streams[pending.stream], -1)
                self.live.pop(name).end = self.order.signallers[pending.event]
        for name in self.section.entry.live:
            self._begin(name, None, -1)
        for line, op in enumerate(self.section.body):
            if isinstance(op, ops.Wait):
                self.order.wait(op)
                continue
            if isinstance(op, ops.Alloc):
                self._begin(op.buffer, self.order.streams[op.stream], line)
            number = self.order.issue(line, op)
            if isinstance(op, ops.Release):
                self.live.pop(op.buffer).end = number

    def _begin(self, name: str, stream: int | None, line: int) -> None:
        """Assign a buffer its bytes, by an op of the stream.

        None: at the entry, where no buffer is known to have ended.
        """
        buffer, start = self.planned[name]
        arena, stop = self.arenas[buffer.space], start + buffer.size_bytes
        for _, _, before in arena.read(start, stop):
            if before is None:
                continue
            if stream is None or before.end is None or not self.order.is_before(before.end, stream):
                self._report(name, before, line)
                break
        self.live[name] = lifetime = _Lifetime(name, line)
        arena.write(start, stop, lifetime)

    def _report(self, name: str, before: _Lifetime, line: int) -> None:
        buffer, start = self.planned[name]
        buffer_before, start_before = self.planned[before.name]
        low = max(start, start_before)
        high = min(start + buffer.size_bytes, start_before + buffer_before.size_bytes)
        since = "from the entry on" if before.line < 0 else f"from @{before.line} on"
        self.findings.add(
            "Z106",
            f"%{name} and %{before.name}, which may still be live {since}, both stand in bytes [{low}:{high}] of the "
            f"{buffer.space} memory",
            section=self.section,
            line=None if line < 0 else line,
            buffers=(name, before.name),
        )
