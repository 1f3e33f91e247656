"""A step of a program as a graph of tasks, which is the same for every rank.

A task is an op, the issue of an op by the host, or a boundary between two sections. The predecessors of an op are the
previous op on its stream, the ops that signal its events, the previous collective on its communicator, its own issue,
and the previous boundary. The issuing thread itself waits where a device stream waits for a host or disk stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from zeroir.config import options_of
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.happens_before import Position, StreamClocks
from zeroir.ir.analysis.threaded_streams import threaded_streams
from zeroir.ir.limits import MOST_SIMULATED_OPS
from zeroir.ir.mesh import COMPUTE, HOST, Executor
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program, Section


class TaskKind(Enum):
    """The kind of a task: an op, its issue by the host, or a boundary between two sections."""

    RUN = auto()
    ISSUE = auto()
    BOUNDARY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task. ``after`` are its predecessors, and ``stream_before`` is the previous op on its stream.

    A boundary has no op; its index is the number of ops of the previous section.
    """

    kind: TaskKind
    section: str
    index: int
    op: Op | None
    stream: str
    after: tuple[int, ...]
    stream_before: int | None = None


def require_micro_steps(program: Program, micro_steps: int | None) -> int:
    """Return the number of micro-steps to simulate: the given one, or else that of the compilation.

    Raises:
        UserError: if the program has no section for so many micro-steps, does not run them in equal groups, or where
            they are too many.
    """
    count = options_of(program).micro_steps.count if micro_steps is None else micro_steps
    if count < 1:
        raise UserError(f"A step has at least one micro-step, and not {count}.")
    group = program.interleaved
    if count % group:
        raise UserError(
            f"The program runs its micro-batches in groups of {group}; simulate a multiple of {group} micro-steps, and "
            f"not {count}."
        )
    if count > group and MICRO_STEP not in program.section_by_name:
        raise UserError(
            f"The program has no section for {count} micro-steps: compile it with --micro-steps {count}."
        )
    repeated = program.section_by_name.get(MICRO_STEP)
    op_count = 0 if repeated is None else len(repeated.body) * (count // group)
    if op_count > MOST_SIMULATED_OPS:
        raise UserError(
            f"A step of {count:,} micro-steps has about {op_count:,} ops, and at most {MOST_SIMULATED_OPS:,} are "
            "simulated: choose fewer micro-steps."
        )
    return count


def step_sections(program: Program, micro_steps: int | None = None) -> list[Section]:
    """Return the sections of a training step in order, with ``micro_step`` once for each of its runs.

    Raises:
        UserError: as ``require_micro_steps``.
    """
    repeats = require_micro_steps(program, micro_steps) // program.interleaved - 1
    names = [*[MICRO_STEP] * repeats, LAST_MICRO_STEP, UPDATE]
    return [program.section_by_name[name] for name in names if name in program.section_by_name]


def step_tasks(
    program: Program, micro_steps: int, *, is_issuing: bool, host_computes: bool
) -> list[Task]:
    """Return the tasks of a training step, as ``section_tasks`` does."""
    return section_tasks(
        program,
        step_sections(program, micro_steps),
        is_issuing=is_issuing,
        host_computes=host_computes,
    )


def two_steps_tasks(
    program: Program, micro_steps: int, *, is_issuing: bool, host_computes: bool
) -> tuple[list[Task], tuple[int, int]]:
    """Return the tasks of two training steps, and the numbers of the boundaries that end them.

    Pending ops at the end of a step overlap with the next one, so the time between the boundaries is that of every step
    but the first.
    """
    sections = step_sections(program, micro_steps)
    tasks = section_tasks(
        program,
        [*sections, *sections],
        is_issuing=is_issuing,
        host_computes=host_computes,
        is_joined=True,
    )
    boundaries = [number for number, task in enumerate(tasks) if task.kind is TaskKind.BOUNDARY]
    return tasks, (boundaries[len(sections) - 1], boundaries[-1])


def is_next_step_overlapped(program: Program) -> bool:
    """Return whether ops of a step may still be pending when the next step starts."""
    sections = step_sections(program)
    signalled = {op.event for s in sections for op in s.body if not isinstance(op, ops.Wait)}
    return any(pending.event in signalled for s in sections[-1:] for pending in s.exit.pending)


def section_tasks(
    program: Program,
    sections: Sequence[Section],
    *,
    is_issuing: bool,
    host_computes: bool,
    is_joined: bool = False,
) -> list[Task]:
    """Return the tasks of consecutive sections, each after its predecessors, and a last boundary if ``is_joined``.

    With ``is_issuing`` the host takes time to issue an op. With ``host_computes`` it issues nothing while it runs an op
    of the stream ``compute``, or while it waits at a boundary. Without it the issuing thread waits where a device
    stream, or a boundary, waits for a stream of the host or a disk, because a device cannot wait for a thread. Copies
    that wait for one are issued by threads (``zeroir.ir.analysis.threaded_streams``), so the issuing thread only waits
    where another stream waits for such a copy, and until it is issued.
    """
    tasks = _TaskList(program, is_issuing=is_issuing, host_computes=host_computes)
    for number, section in enumerate(sections):
        if number:
            tasks.join(sections[number - 1])
        for index, op in enumerate(section.body):
            tasks.add(section.name, index, op)
    if is_joined:
        tasks.join(sections[-1])
    return tasks.tasks


class _TaskList:
    def __init__(self, program: Program, *, is_issuing: bool, host_computes: bool) -> None:
        self.tasks: list[Task] = []
        self._is_issuing = is_issuing
        self._host_computes = host_computes
        # A wait is a task as well, and the host runs its own waits.
        self._clocks = StreamClocks((*(stream.name for stream in program.streams), HOST))
        self._on_stream: list[list[int]] = [[] for _ in self._clocks.numbers]
        self._on_comm: dict[str, int] = {}
        self._on_threads = frozenset(
            number
            for stream, number in self._clocks.numbers.items()
            if stream in {s.name for s in program.streams if s.executor is not Executor.DEVICE}
        )
        apart = frozenset() if host_computes else threaded_streams(program)
        self._apart = frozenset(self._clocks.numbers[stream] for stream in apart)
        self._awaited_apart: dict[int, tuple[int, ...]] = dict.fromkeys(self._apart, ())
        """For each stream that a thread issues, the tasks of threads after which its next op is issued."""
        self._issued_after: dict[int, tuple[int, ...]] = {}
        """The same for each of its tasks so far."""
        self._host: tuple[int, ...] = ()
        self._boundary: int | None = None
        self._joined: set[int] = set()

    def add(self, section: str, index: int, op: Op) -> None:
        """Add the next op of a section."""
        effect = effects(op)
        stream = self._clocks.numbers[effect.stream]
        if self._is_issuing:
            issue = Task(
                kind=TaskKind.ISSUE,
                section=section,
                index=index,
                op=op,
                stream=HOST,
                after=self._host,
            )
            self._host = (self._append(issue),)
        stream_tasks = self._on_stream[stream]
        before = stream_tasks[-1] if stream_tasks else None
        after = [before, *self._host]
        if stream not in self._joined:
            # Later ops of the stream follow this one anyway.
            after.append(self._boundary)
            self._joined.add(stream)
        signallers = [self._clocks.signaller(event) for event in effect.waits]
        after += map(self._task_at, signallers)
        if effect.comm is not None:
            after.append(self._on_comm.get(effect.comm))
        task = Task(
            kind=TaskKind.RUN,
            section=section,
            index=index,
            op=op,
            stream=effect.stream,
            after=_present(*after),
            stream_before=before,
        )
        number = self._append(task)
        stream_tasks.append(number)
        # The edges of waits are in ``after``; the clocks only find the positions of ops.
        self._clocks.issue(stream, *effect.signals)
        if effect.comm is not None:
            self._on_comm[effect.comm] = number
        is_waited_for_by_host = isinstance(op, ops.Wait) and op.on == HOST
        if is_waited_for_by_host or (self._host_computes and effect.stream == COMPUTE):
            self._host = (number,)
        elif stream in self._apart:
            awaited = (*self._awaited_apart[stream], *self._of_threads(signallers))
            self._awaited_apart[stream] = self._issued_after[number] = tuple(dict.fromkeys(awaited))
        elif not self._host_computes and stream not in self._on_threads:
            self._wait_for_threads(signallers)

    def join(self, section: Section) -> None:
        """Add the boundary after a section: later tasks follow all earlier ones except those with pending events."""
        last = self._clocks.join([pending.event for pending in section.exit.pending])
        task = Task(
            kind=TaskKind.BOUNDARY,
            section=section.name,
            index=len(section.body),
            op=None,
            stream=HOST,
            after=_present(*map(self._task_at, last), self._boundary),
        )
        self._boundary = self._append(task)
        self._joined = set()
        if self._host_computes:
            self._host = (self._boundary,)
        else:
            self._wait_for_threads(last)

    def _wait_for_threads(self, positions: Iterable[Position | None]) -> None:
        """Make the issuing thread wait until threads have run these ops, or issued them."""
        self._host = _present(*self._host, *self._of_threads(positions))

    def _of_threads(self, positions: Iterable[Position | None]) -> list[int]:
        """Return the tasks of threads that are done once threads have run these ops, or issued them."""
        awaited: list[int] = []
        for position in positions:
            number = self._task_at(position)
            if number is None or position is None:
                continue
            if position[0] in self._on_threads:
                awaited.append(number)
            awaited += self._issued_after.get(number, ())
        return awaited

    def _task_at(self, position: Position | None) -> int | None:
        if position is None:
            return None
        stream, place = position
        return self._on_stream[stream][place - 1]

    def _append(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _present(*numbers: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for number in numbers if number is not None))


def followers(tasks: Sequence[Task]) -> list[list[int]]:
    """Return for each task those that have it among their predecessors."""
    followers_of: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers_of[before].append(number)
    return followers_of
