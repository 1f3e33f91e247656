"""What the ranks of a program do in a run, as a system whose states can be enumerated.

Each rank has a queue of tasks for each stream, and one for the host. A task begins when what it needs is done, and
ends. So a state is a count for each queue: twice the tasks that ended, and one more while a task is under way. What a
step of a queue needs are least counts of other queues.

* An op needs the op before it in its queue, the events that its stream waits for, and the host, which has issued it.
* The host stops at ``wait … on=host`` and at boundaries, where it waits for all ops that are not pending. There it
  reads and writes the buffers that docs/ir.md says. Who reads snapshots has a queue.
* A collective ends when each rank of its group has begun the collective that has the same number on the communicator,
  and never if that is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.checker.program import (
    COLLECTIVES,
    HOST,
    MICRO_STEPS,
    Declarations,
    PlacedSection,
    changes,
    reads,
)
from tools.checker.reading import ITEM_BYTES, FileRecord

NEVER = 1 << 30
_READER = "reader of snapshots"

Need = tuple[int, int]
"""A queue, and the least count that it must have."""


class Touch(NamedTuple):
    """A use of elements of a buffer, or of bytes of memory that buffers share."""

    memory: str
    start: int
    stop: int
    writes: bool

    def meets(self, other: Touch) -> bool:
        """Whether both use one element."""
        is_apart = self.stop <= other.start or other.stop <= self.start
        return self.memory == other.memory and not is_apart


class QueuedTask(NamedTuple):
    """An op, or what the host does at once. ``life`` are the kind and the bytes of a buffer that it begins or ends."""

    what: str
    touched: tuple[Touch, ...] = ()
    comm: str = ""
    life: tuple[str, int] = ("", 0)


@dataclass
class Queue:
    """The tasks of one stream of one rank; ``needs[c]`` is what its step from count c to the next one needs."""

    rank: int
    name: str
    tasks: list[QueuedTask] = field(default_factory=list)
    needs: list[tuple[Need, ...]] = field(default_factory=list)
    awaited: list[Need] = field(default_factory=list)


@dataclass
class System:
    """The queues of all ranks, and the axis of each communicator."""

    queues: list[Queue] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)

    def queues_of(self, rank: int) -> list[int]:
        """Return the queues of a rank that have tasks."""
        return [i for i, queue in enumerate(self.queues) if queue.rank == rank and queue.tasks]

    def conflict(self, one: tuple[int, int], other: tuple[int, int]) -> str | None:
        """Return what two tasks of a rank use that they must not use at once, if there is anything."""
        a, b = (self.queues[queue].tasks[at] for queue, at in (one, other))
        if a.comm and b.comm and (a.comm == b.comm or self.axes[a.comm] != self.axes[b.comm]):
            return f"the ranks of {b.comm}"
        for x in a.touched:
            for y in b.touched:
                if (x.writes or y.writes) and x.meets(y):
                    return f"%{x.memory}"
        return None

    def may_conflict(self, first: int, second: int) -> bool:
        """Return whether two queues both use some memory, or both have collectives."""
        used = [
            {touch.memory for task in self.queues[i].tasks for touch in task.touched}
            | {"%" for task in self.queues[i].tasks if task.comm}
            for i in (first, second)
        ]
        return not used[0].isdisjoint(used[1])


def system_of(
    programs: Sequence[Declarations], run: Sequence[PlacedSection], *, blocking: str = ""
) -> System:
    """Return the system of a run in which rank r carries out ``programs[r]``.

    The thread that issues ops also carries out those of the stream ``blocking``, or waits with each stream of a device
    for streams of the host where it is ``devices``.
    """
    system = System(axes={name: comm.axis for name, comm in programs[0].comms.items()})
    issuers = [_Issuer(names, rank, system, blocking) for rank, names in enumerate(programs)]
    for issuer in issuers:
        previous: FileRecord | None = None
        for visit in run:
            section = issuer.names.sections[visit.section]
            issuer.enter(previous, section)
            for line, op in enumerate(section.body):
                issuer.issue(f"{section.name} {line} ({op.kind})", op)
            previous = section
    for rank, issuer in enumerate(issuers):
        for comm, own in issuer.collectives.items():
            (group,) = (group for group in issuer.names.groups(comm) if rank in group)
            for number, (queue, begun, same) in enumerate(own):
                met = [issuers[r].collectives.get(comm, [])[number : number + 1] for r in group]
                alike = all(other and other[0][2] == same for other in met)
                needs = [(other[0][0], other[0][1]) for other in met if other]
                system.queues[queue].needs[begun] = tuple(needs) if alike else ((queue, NEVER),)
    return system


class _Issuer:
    """The thread of one rank that issues ops to queues, in program order."""

    def __init__(self, names: Declarations, rank: int, system: System, blocking: str) -> None:
        self.names, self.rank, self.system, self.blocking = names, rank, system, blocking
        self.executors = {stream.name: stream.executor for stream in names.program.streams}
        streams = [HOST, _READER, *(name for name in self.executors if name != blocking)]
        self.queues = {name: len(system.queues) + i for i, name in enumerate(streams)}
        self.queues |= {blocking: self.queues[HOST]} if blocking in self.executors else {}
        system.queues += [Queue(rank, name) for name in streams]
        self.events: dict[str, Need | None] = {}
        self.collectives: dict[str, list[tuple[int, int, FileRecord]]] = {}
        """The collectives on each communicator: queue, count while under way, and what ranks must agree about."""

    def enter(self, previous: FileRecord | None, section: FileRecord) -> None:
        """Stop at the boundary before a section."""
        left = [] if previous is None else [p.event for p in previous.exit.pending]
        pending = {self.events.get(event) for event in left}
        needs = []
        for stream in self.executors:
            queue, done = self._tail(stream)
            while done and (queue, done) in pending:
                done -= 2
            needs += [(queue, done)] if queue != self.queues[HOST] else []
        at = f"the host before {section.name}"
        self._add(HOST, QueuedTask(at, tuple(self._touched_by_host(previous, section))), needs)
        if previous is not None and previous.name == "save":
            self._read_snapshots()
        if section.name == "save":
            self._add(HOST, QueuedTask("the host before it saves again"), [self._tail(_READER)])
        self.events = {p.event: self.events.get(p.event) for p in section.entry.pending}

    def issue(self, what: str, op: FileRecord) -> None:
        """Issue an op, or wait."""
        if op.kind == "Wait":
            self._wait(what, op)
            return
        comm, life = op.comm if op.kind in COLLECTIVES else "", ("", 0)
        if op.kind in {"Alloc", "Release"}:
            buffer, size = self.names.buffers[op.buffer], self.names.size_bytes(op.buffer)
            life = f"{buffer.space} {buffer.role}", size if op.kind == "Alloc" else -size
        done = self._add(op.stream, QueuedTask(what, tuple(self._touched(op)), comm, life), [])
        if comm:
            fields = {name: value for name, value in vars(op).items() if name != "event"}
            same = FileRecord(fields.pop("kind"), fields)
            self.collectives.setdefault(comm, []).append((done[0], done[1] - 1, same))
        if op.event is not None:
            self.events[op.event] = done

    def _wait(self, what: str, op: FileRecord) -> None:
        need = self.events.get(op.waited, (self.queues[HOST], NEVER))
        if need is None:  # signalled since ever
            return
        is_held = self.blocking == "devices" and self.executors.get(op.on) == "device"
        if op.on == HOST or (is_held and self.executors.get(self._of(need).name) != "device"):
            self._add(HOST, QueuedTask(what), [need])
        if op.on != HOST:
            self.system.queues[self.queues[op.on]].awaited.append(need)

    def _of(self, need: Need) -> Queue:
        return self.system.queues[need[0]]

    def _tail(self, stream: str) -> Need:
        """Return what whoever comes after all tasks of a stream so far needs."""
        queue = self.queues[stream]
        return queue, 2 * len(self.system.queues[queue].tasks)

    def _add(self, stream: str, task: QueuedTask, needs: Sequence[Need]) -> Need:
        """Append a task to a stream; return what whoever comes after it needs."""
        queue = self.system.queues[self.queues[stream]]
        issued = [] if queue.name == HOST else [self._tail(HOST)]
        least: dict[int, int] = {}
        for other, count in (*queue.awaited, *issued, *needs):
            least[other] = max(count, least.get(other, 0))
        queue.needs += [tuple(least.items()), ()]
        queue.awaited.clear()
        queue.tasks.append(task)
        return self._tail(stream)

    def _read_snapshots(self) -> None:
        """Let another thread wait for all copies, and read the snapshots."""
        snapshots = [
            (name, buffer.holds.event)
            for name, buffer in self.names.buffers.items()
            if buffer.holds is not None and buffer.holds.kind == "SnapshotContent"
        ]
        needs = [need for _, event in snapshots if (need := self.events.get(event)) is not None]
        touched = tuple(self._whole(name, writes=False) for name, _ in snapshots)
        self._add(_READER, QueuedTask(f"the {_READER}", touched), needs)

    def _touched_by_host(self, previous: FileRecord | None, section: FileRecord) -> Iterator[Touch]:
        program, before = self.names.program, "" if previous is None else previous.name
        settings = {buffer for group in program.groups for buffer in (group.lr, group.hyper)}
        for name, buffer in self.names.buffers.items():
            is_filled = section.name in {*MICRO_STEPS, "evaluate"} and (
                buffer.role in {"input", "rng"} or name == program.weight
            )
            is_changed = buffer.role == "scalar" and (
                before in {"update", "evaluate"} or (before == "micro_step" and name in settings)
            )
            if is_filled or is_changed or (before and buffer.role in {"scalar", "output"}):
                yield self._whole(name, writes=is_filled or is_changed)

    def _touched(self, op: FileRecord) -> Iterator[Touch]:
        if op.kind in {"Alloc", "Release"}:
            yield self._whole(op.buffer)
        for region in reads(op):
            yield self._touch(region.buffer, *self.names.span(region, self.rank), writes=False)
        for region, _ in changes(op):
            yield self._touch(region.buffer, *self.names.span(region, self.rank))

    def _whole(self, name: str, *, writes: bool = True) -> Touch:
        return self._touch(name, 0, self.names.buffers[name].numel, writes=writes)

    def _touch(self, name: str, start: int, stop: int, *, writes: bool = True) -> Touch:
        buffer = self.names.buffers[name]
        if buffer.offset is None:
            return Touch(name, start, stop, writes)
        item, place = ITEM_BYTES[buffer.dtype], buffer.offset
        return Touch(f"{buffer.space} memory", place + start * item, place + stop * item, writes)
