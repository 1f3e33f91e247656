"""Races, lifetimes, events, collectives and places: by reachability among the ops of a run of several sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tools.checker.program import (
    COLLECTIVES,
    HOST,
    MICRO_STEPS,
    Declarations,
    PlacedSection,
    changes,
    reads,
    visits,
)
from tools.checker.reading import FileRecord

Report = Callable[[str], None]


@dataclass
class BufferUse:
    """A use of elements of a buffer: on each rank from one element to another."""

    node: int
    spans: tuple[tuple[int, int], ...]
    writes: bool
    what: str

    def meets(self, other: BufferUse) -> bool:
        """Whether both touch an element on some rank."""
        pairs = zip(self.spans, other.spans, strict=True)
        return any(a < d and c < b for (a, b), (c, d) in pairs)


@dataclass
class Life:
    """A temporary buffer from its alloc to its release; the numbers of both nodes."""

    buffer: str
    begin: int
    end: int | None = None


@dataclass
class OrderedRun:
    """The ops of a run, numbered; ``before[n]`` has a bit for each node that surely completes before node n."""

    names: Declarations
    report: Report
    before: list[int] = field(default_factory=list)
    tails: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    signalling: set[int] = field(default_factory=set)
    carried: dict[int, int] = field(default_factory=dict)
    """Of each op that was pending at the last boundary: its bit, and those of the ops before it on its stream."""
    uses: dict[str, list[BufferUse]] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    ended: list[Life] = field(default_factory=list)
    collectives: list[tuple[int, str, str]] = field(default_factory=list)
    host: int = 0
    boundary: int = 0

    def add(self, predecessors: int, stream: str | None = None) -> int:
        """Add a node after the nodes whose bits are given, and after what its stream and the host have done."""
        known = self.boundary | self.host | predecessors
        if stream is not None and stream in self.tails:
            known |= self.after(self.tails[stream])
        self.before.append(known)
        if stream is not None:
            self.tails[stream] = len(self.before) - 1
        return len(self.before) - 1

    def after(self, node: int) -> int:
        """The bits of a node and of all that whoever comes after it may count on."""
        return self.carried.get(node, self.before[node] | 1 << node)

    def is_before(self, first: int, second: int) -> bool:
        """Whether one node surely completes before another begins."""
        return bool(self.before[second] >> first & 1)

    def touch(self, buffer: str, use: BufferUse) -> None:
        """Note a use, and report each earlier one that it races with.

        A write of the whole buffer stands for the uses before it, save those of ops that may be pending at a boundary.
        """
        kept: list[BufferUse] = []
        whole = use.writes and all(
            span == (0, self.names.buffers[buffer].numel) for span in use.spans
        )
        for other in self.uses.get(buffer, []):
            ordered = other.node == use.node or self.is_before(other.node, use.node)
            if not ordered and (use.writes or other.writes) and use.meets(other):
                self.report(
                    f"race: {use.what} and {other.what} use %{buffer}, and no wait orders them"
                )
            if not (whole and ordered) or other.node in self.signalling:
                kept.append(other)
        self.uses[buffer] = [*kept, use]


Bounds = Callable[[OrderedRun, list[tuple[int, int, FileRecord]]], None]
"""Examines a section whose ops have been added, each with its index and its node."""


def check_order(names: Declarations, report: Report, bounds: Bounds) -> None:
    """Report what is wrong in some interleaving of a run, with saves and without, of steps long and short."""
    found: set[str] = set()

    def once(text: str) -> None:
        if text not in found:
            found.add(text)
            report(text)

    for saves, counts in ((True, (3, 1)), (False, (3, 1, 2))):
        _check_run(names, visits(names, saves, counts), once, bounds)


def _check_run(
    names: Declarations, run: list[PlacedSection], report: Report, bounds: Bounds
) -> None:
    state = OrderedRun(names, report)
    previous: FileRecord | None = None
    for visit in run:
        section = names.sections[visit.section]
        if previous is not None:
            _check_meeting(previous, section, report)
        _enter(state, previous, section)
        ops = [
            (i, _add_op(state, f"{section.name} {i}", op), op) for i, op in enumerate(section.body)
        ]
        bounds(state, ops)
        live = {life.buffer for life in state.lives.values()}
        if live != set(section.exit.live):
            names_of = " ".join(sorted(live ^ set(section.exit.live)))
            report(
                f"section {section.name} ends with other live buffers than its exit state says: {names_of}"
            )
        for pending in section.exit.pending:
            node = state.events.get(pending.event)
            if node is None and any(v.section == "save" for v in run):
                report(
                    f"section {section.name} ends with pending event {pending.event}, which no op signals"
                )
        previous = section
    _check_collectives(state)
    _check_places(state)


def _enter(state: OrderedRun, previous: FileRecord | None, section: FileRecord) -> None:
    """Order everything after the boundary but what its pending events stand for.

    A stream comes after the pending ops of its own queue, and after none of those for which it waited before.
    """
    state.tails, state.carried = {}, {}
    for pending in () if previous is None else previous.exit.pending:
        node = state.events.get(pending.event, -1)
        if node >= 0:
            earlier = state.carried.get(state.tails.get(pending.stream, -1), 0)
            state.carried[node] = earlier | 1 << node
            state.tails[pending.stream] = node
    under_way, entry = set(state.carried), {p.event for p in section.entry.pending}
    done = (1 << len(state.before)) - 1
    for node in under_way:
        done &= ~(1 << node)
    state.boundary |= done
    state.host = 0
    state.events = {e: n for e, n in state.events.items() if e in entry}
    for event in entry - state.events.keys():
        state.events[event] = -1  # nothing was saved yet: signalled since ever
    if previous is None:
        for name in section.entry.live:
            state.lives[name] = Life(name, state.add(0))
    _check_host(state, under_way, previous)
    for node in under_way - set(state.events.values()):
        state.boundary |= 1 << node


def _check_host(state: OrderedRun, under_way: set[int], previous: FileRecord | None) -> None:
    """The host waits for no op that is under way, and reads or writes some buffers after the section before."""
    if previous is None:
        return
    program = state.names.program
    refills = previous.name in {"micro_step", "update", "evaluate"}
    settings_of_groups = {buffer for g in program.groups for buffer in (g.lr, g.hyper)}
    for name, buffer in state.names.buffers.items():
        is_filled = refills and (buffer.role in {"input", "rng"} or name == program.weight)
        is_read = buffer.role in {"scalar", "output"}
        may_change = buffer.role == "scalar" and (
            previous.name in {"update", "evaluate"}
            or (previous.name == "micro_step" and name in settings_of_groups)
        )
        for use in state.uses.get(name, []):
            if use.node in under_way and (is_filled or may_change or (is_read and use.writes)):
                state.report(f"race: {use.what} may use %{name} when the host reads or writes it")


def _add_op(state: OrderedRun, what: str, op: FileRecord) -> int:
    """Add an op to the run and return its node."""
    what = f"{what} ({op.kind})"
    if op.kind == "Wait":
        node = state.events.get(op.waited)
        if node is None:
            state.report(f"{what} waits for {op.waited}, which no earlier op signals")
        elif node >= 0:
            known = state.after(node)
            if op.on == HOST:
                state.host |= known
            else:
                return state.add(known, op.on)
        return -1
    node = state.add(0, op.stream)
    if op.kind in {"Alloc", "Release"}:
        _add_life(state, what, op, node)
    for region in reads(op):
        _use(state, what, region, node, writes=False)
    for region, _ in changes(op):
        _use(state, what, region, node, writes=True)
    if op.kind in COLLECTIVES:
        state.collectives.append((node, op.comm, what))
    if op.event is not None:
        state.events[op.event] = node
        state.signalling.add(node)
    return node


def _add_life(state: OrderedRun, what: str, op: FileRecord, node: int) -> None:
    name = op.buffer
    numel = state.names.buffers[name].numel
    if op.kind == "Alloc":
        if name in state.lives:
            state.report(f"{what} begins %{name}, which is live")
        state.lives[name] = Life(name, node)
    elif name not in state.lives:
        state.report(f"{what} ends %{name}, which is not live")
    else:
        life = state.lives.pop(name)
        life.end = node
        state.ended.append(life)
    spans = ((0, numel),) * state.names.ranks
    state.touch(name, BufferUse(node, spans, writes=True, what=what))


def _use(state: OrderedRun, what: str, region: FileRecord, node: int, *, writes: bool) -> None:
    name = region.buffer
    if state.names.buffers[name].holds is None and name not in state.lives:
        state.report(f"{what} uses %{name}, which is not live")
    spans = tuple(state.names.span(region, rank) for rank in range(state.names.ranks))
    state.touch(name, BufferUse(node, spans, writes, what))


def _check_meeting(previous: FileRecord, section: FileRecord, report: Report) -> None:
    """The exit state of a section must be the entry state of the next."""
    one, other = previous.exit, section.entry
    if set(one.live) != set(other.live) or set(one.holdings) != set(other.holdings):
        report(f"the exit state of {previous.name} is not the entry state of {section.name}")
    if sorted(map(_key, one.pending)) != sorted(map(_key, other.pending)):
        report(f"{previous.name} and {section.name} disagree about pending events")


def _key(pending: FileRecord) -> tuple[str, str]:
    return pending.event, pending.stream


def _check_collectives(state: OrderedRun) -> None:
    """Every two collectives must come in one order, unless two communicators run over one axis."""
    axis_of = {name: comm.axis for name, comm in state.names.comms.items()}
    last: dict[str, tuple[int, str]] = {}
    for node, comm, what in state.collectives:
        for other, (earlier, whose) in last.items():
            side_by_side = other != comm and axis_of[other] == axis_of[comm]
            if not side_by_side and not state.is_before(earlier, node):
                state.report(
                    f"collectives without an order that all ranks share: {whose} and {what}"
                )
        last[comm] = node, what


def _check_places(state: OrderedRun) -> None:
    """Two buffers that share bytes must not be live at once: a sweep over places, then the order of their ends."""
    names, by_space = state.names, dict[str, list[tuple[int, int, Life]]]()
    for life in [*state.ended, *state.lives.values()]:
        buffer = names.buffers[life.buffer]
        if buffer.offset is not None:
            stop = buffer.offset + names.size_bytes(life.buffer)
            by_space.setdefault(buffer.space, []).append((buffer.offset, stop, life))
    for placed in by_space.values():
        placed.sort(key=lambda item: item[0])
        for first, second in _overlapping(placed):
            if (
                first.buffer == second.buffer
                or _is_over(state, first, second)
                or _is_over(state, second, first)
            ):
                continue
            one, other = sorted((first.buffer, second.buffer))
            state.report(f"%{one} and %{other} share memory, and may be live at the same time")


def _overlapping(placed: list[tuple[int, int, Life]]) -> Iterator[tuple[Life, Life]]:
    active: list[tuple[int, Life]] = []
    for start, stop, life in placed:
        active = [(end, other) for end, other in active if end > start]
        for _, other in active:
            yield other, life
        active.append((stop, life))


def _is_over(state: OrderedRun, first: Life, second: Life) -> bool:
    return first.end is not None and state.is_before(first.end, second.begin)


def check_pending(names: Declarations, report: Report) -> None:
    """Each pending event must be signalled on the stream that its state names, in the order of the ops."""
    for section in names.program.sections:
        signalled = {
            op.event: (i, op.stream)
            for i, op in enumerate(section.body)
            if getattr(op, "event", None)
        }
        entering = {p.event: p.stream for p in section.entry.pending}
        places: dict[str, int] = {}
        for pending in section.exit.pending:
            at, stream = signalled.get(pending.event, (-1, entering.get(pending.event)))
            if stream != pending.stream:
                report(
                    f"exit of {section.name}: no op on {pending.stream} signals pending event {pending.event}"
                )
            if at >= 0 and places.get(pending.stream, -1) > at:
                report(
                    f"exit of {section.name}: the pending events of {pending.stream} are not in the order of ops"
                )
            places[pending.stream] = max(places.get(pending.stream, -1), at)
        if section.name in MICRO_STEPS and names.program.interleaved < 1:
            report("interleaved micro-batches below 1")
