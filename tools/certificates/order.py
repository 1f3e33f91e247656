"""Order, lifetimes and places, from the clocks of a certificate: how many ops of each stream are surely done."""

from __future__ import annotations

from typing import Any

from tools.certificates.bounds import SectionBounds
from tools.certificates.spans import Spans, require
from tools.checker.program import COLLECTIVES, HOST, Declarations, changes, reads
from tools.checker.reading import FileRecord

AFTER = {
    "micro_step": ("micro_step", "last_micro_step", "save"),
    "last_micro_step": ("update",),
    "update": ("micro_step", "last_micro_step", "evaluate", "save"),
    "evaluate": ("evaluate", "micro_step", "last_micro_step", "save"),
    "save": ("save", "micro_step", "last_micro_step", "evaluate"),
}
"""The sections that may follow each section."""
Way = dict[str, tuple[str, int]]
"""Events that are pending at the entry of a section, each with the section and the line of its op."""


def check_order(names: Declarations, claims: dict[str, tuple[list[Way], list[Any]]]) -> None:
    """Check the order of a program; ``claims`` are the ways into each section and the clocks of its ops."""
    for first in names.sections:
        for second in names.sections.keys() & set(AFTER[first]):
            _check_meeting(names, first, second, claims)
    for name, (ways, clocks) in claims.items():
        require(ways, f"no way leads to section {name}")
        for way in ways:
            _SectionOrder(names, names.sections[name], way).run(clocks)


def _check_meeting(
    names: Declarations, first: str, second: str, claims: dict[str, tuple[list[Way], list[Any]]]
) -> None:
    """The exit of a section must be the entry of the next, and its pending ops one of the ways there."""
    section, entry = names.sections[first], names.sections[second].entry
    for of in ("live", "holdings", "pending"):
        one, other = (set(getattr(state, of)) for state in (section.exit, entry))
        require(one == other, f"exit of {first} is not the entry of {second}")
    signalled = {
        op.event: (first, line)
        for line, op in enumerate(section.body)
        if op.kind != "Wait" and op.event is not None
    }
    pending = [p.event for p in section.exit.pending]
    for way in claims[first][0]:
        here = {**way, **signalled}
        leaving = {event: here[event] for event in pending if event in here}.items()
        is_known = any(leaving <= other.items() for other in claims[second][0])
        require(is_known, f"ops of {first} may be pending in {second}, which no way there says")


class _SectionOrder:
    """One section, with some ops pending at its entry; ops are numbered, and -1 stands for what is done."""

    def __init__(self, names: Declarations, section: FileRecord, way: Way) -> None:
        self.names, self.section, self.way = names, section, way
        self.streams = {s.name: i for i, s in enumerate(names.program.streams)}
        self.known = {s: [0] * len(self.streams) for s in self.streams}
        self.issued: list[tuple[int, int]] = []
        self.counts = [0] * len(self.streams)
        self.events: dict[str, tuple[int, list[int]]] = {}
        self.uses: dict[str, Spans] = {}
        self.live = set(section.entry.live)
        self.ended: dict[str, int] = {}
        self.collectives: dict[str, int] = {}
        self.places = {s: Spans(1 << 62, None) for s in ("device", "host", "disk")}
        self.clock: list[int] = []
        self.bounds = SectionBounds(names, section)
        self.where = f"entry of {section.name}"

    def run(self, clocks: list[Any]) -> None:
        section = self.section
        self.clock = [0] * len(self.streams)
        self._enter()
        for name in section.entry.live:
            self._place(name)
        require(len(clocks) == len(section.body), f"section {section.name} has other ops")
        for line, (op, clock) in enumerate(zip(section.body, clocks, strict=True)):
            self.where = f"op {line} of {section.name}"
            if op.kind == "Wait":
                self._wait(op)
            else:
                self._op(op, clock)
                self.bounds.issued(op, line, len(self.issued) - 1)
        self._leave()

    def _enter(self) -> None:
        for pending in self.section.entry.pending:
            number = self._issue(pending.stream, pending.event)
            for holding in self.section.entry.holdings:
                if holding.after == pending.event:
                    self._use(holding.region, number, writes=True)
            section, line = self.way.get(pending.event, ("", 0))
            if not section:
                continue
            op = self.names.sections[section].body[line]
            if op.kind == "Alloc":
                self.uses[op.buffer] = Spans(self.names.buffers[op.buffer].numel, (number, {}))
            elif op.kind == "Release":
                self.ended.setdefault(op.buffer, number)
                if op.buffer not in self.live:
                    self._place(op.buffer)
                    self._end(op.buffer, number)
            else:
                for region, _ in changes(op):
                    self._use(region, number, writes=True)
                for region in reads(op):
                    self._use(region, number, writes=False)
            if op.kind in COLLECTIVES:
                self.collectives[op.comm] = number

    def _issue(self, stream: str, event: str | None) -> int:
        """Put an op on its stream; ``known`` is what is done before the next one there."""
        at = self.streams[stream]
        self.issued.append((at, self.counts[at]))
        self.counts[at] += 1
        self.known[stream][at] = self.counts[at]
        if event is not None:
            self.events[event] = len(self.issued) - 1, list(self.known[stream])
        return len(self.issued) - 1

    def _wait(self, op: FileRecord) -> None:
        require(op.waited in self.events, f"{self.where} waits for what no op signals")
        done = self.events[op.waited][1]
        for stream in self.streams if op.on == HOST else (op.on,):
            self.known[stream] = list(map(max, self.known[stream], done))

    def _after(self, number: int, what: str) -> None:
        """Require that the present op begins after another one is done, by its clock."""
        require(self._is_done(number), f"{self.where} {what}")

    def _is_done(self, number: int) -> bool:
        stream, place = self.issued[number] if number >= 0 else (0, -1)
        return self.clock[stream] > place

    def _op(self, op: FileRecord, clock: list[int]) -> None:
        known = self.known[op.stream]
        is_known = len(clock) == len(known) and all(map(int.__le__, clock, known))
        require(is_known, f"{self.where} claims to follow ops that nothing orders before it")
        self.clock = self.known[op.stream] = list(clock)
        number = len(self.issued)
        if op.kind in COLLECTIVES:
            axis = self.names.comms[op.comm].axis
            for comm, last in self.collectives.items():
                if comm == op.comm or self.names.comms[comm].axis != axis:
                    self._after(last, "has no order with another collective")
            self.collectives[op.comm] = number
        if op.kind == "Alloc":
            self.bounds.begin(op, self._is_done)
            self._begin(op.buffer, number)
        elif op.kind == "Release":
            self._check(op.buffer, 0, self.names.buffers[op.buffer].numel, writes=True)
            require(op.buffer in self.live, f"{self.where} releases %{op.buffer} again")
            self.live.discard(op.buffer)
            self.ended[op.buffer] = number
            self._end(op.buffer, number)
        else:
            for region in reads(op):
                self._check(region.buffer, region.offset, region.numel, writes=False)
            for region, _ in changes(op):
                self._check(region.buffer, region.offset, region.numel, writes=True)
        self._issue(op.stream, op.event)
        if op.kind not in {"Alloc", "Release"}:
            for region in reads(op):
                self._use(region, number, writes=False)
            for region, _ in changes(op):
                self._use(region, number, writes=True)

    def _map(self, name: str) -> Spans:
        return self.uses.setdefault(name, Spans(self.names.buffers[name].numel, (-1, {})))

    def _check(self, name: str, start: int, numel: int, *, writes: bool) -> None:
        """Require that an op comes after all uses with which it conflicts."""
        is_there = name in self.live or self.names.buffers[name].holds is not None
        require(is_there, f"{self.where} uses %{name}, which is not live")
        for _, _, (writer, readers) in self._map(name).read(start, start + numel):
            for other in (writer, *(readers.values() if writes else ())):
                self._after(other, f"uses %{name} while another op may use it")

    def _use(self, region: FileRecord, number: int, *, writes: bool) -> None:
        stop = region.offset + region.numel
        uses = self._map(region.buffer)
        stream = self.issued[number][0]
        for start, end, (writer, readers) in uses.read(region.offset, stop):
            uses.write(
                start, end, (number, {}) if writes else (writer, {**readers, stream: number})
            )

    def _begin(self, name: str, number: int) -> None:
        require(name not in self.live, f"{self.where} begins %{name}, which is live")
        self._after(self.ended.get(name, -1), f"begins %{name} before its end")
        self.live.add(name)
        self.uses[name] = Spans(self.names.buffers[name].numel, (number, {}))
        self._place(name)

    def _place(self, name: str) -> None:
        """Require that whatever stood in the bytes of a buffer has ended."""
        buffer = self.names.buffers[name]
        if buffer.offset is not None:
            start, stop = buffer.offset, buffer.offset + self.names.size_bytes(name)
            place = self.places[buffer.space]
            for _, _, before in place.read(start, stop):
                if before is not None:
                    require(len(before) > 1, f"{self.where}: %{name} and %{before[0]} share bytes")
                    self._after(before[-1], f"begins %{name} where %{before[0]} stands")
            place.write(start, stop, [name])

    def _end(self, name: str, number: int) -> None:
        buffer = self.names.buffers[name]
        if buffer.offset is not None:
            stop = buffer.offset + self.names.size_bytes(name)
            for _, _, before in self.places[buffer.space].read(buffer.offset, stop):
                if before is not None and before[0] == name:
                    before.append(number)

    def _leave(self) -> None:
        """Check what is live or pending at the end: the host and the next section see it."""
        state, name = self.section.exit, self.section.name
        require(self.live == set(state.live), f"exit of {name}: other buffers are live")
        last: dict[str, int] = {}
        for pending in state.pending:
            number = self.events.get(pending.event, (-1, []))[0]
            is_there = number >= 0 and self.issued[number][0] == self.streams[pending.stream]
            require(is_there, f"exit of {name}: no op signals {pending.event}")
            require(number > last.get(pending.stream, -1), f"exit of {name}: events out of order")
            last[pending.stream] = number
            own = [
                op for op in self.section.body if op.kind != "Wait" and op.event == pending.event
            ]
            if own or pending.event in self.way:
                section, line = self.way.get(pending.event, ("", 0))
                self._leave_pending(
                    own[-1] if own else self.names.sections[section].body[line], pending.event
                )

    def _leave_pending(self, op: FileRecord, event: str) -> None:
        name, program = self.section.name, self.names.program
        settings = {b for g in program.groups for b in (g.lr, g.hyper)}
        writes = [region for region, _ in changes(op)]
        for region in [*reads(op), *writes]:
            buffer = self.names.buffers[region.buffer]
            is_written = any(r is region for r in writes)
            is_filled = buffer.role in {"input", "rng"} or buffer.name == program.weight
            may_change = (
                buffer.role == "scalar" if name != "micro_step" else buffer.name in settings
            )
            is_free = name in {"micro_step", "update", "evaluate"} and (is_filled or may_change)
            is_read = is_written and buffer.role in {"scalar", "output"}
            require(
                not is_free and not is_read,
                f"exit of {name}: the host uses %{buffer.name}, which an op may still use",
            )
            if not is_written or getattr(buffer.holds, "event", None) == event:
                continue
            over = [
                h.after
                for h in self.section.exit.holdings
                if h.region.buffer == region.buffer
                and h.region.offset < region.offset + region.numel
                and region.offset < h.region.offset + h.region.numel
            ]
            is_told = set(over) == {event} if over or buffer.holds is not None else True
            require(
                is_told, f"exit of {name}: %{buffer.name} is not said to be whole after {event}"
            )
