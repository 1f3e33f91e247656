"""Whole sections as CUDA graphs: issued op by op a few times, then captured, and from then on launched in one call.

A graph does again, at the same addresses, what the device was given to do while it was captured; what the host did
meanwhile it did once. ``why_not`` says which sections that suits. What holds then:

* Buffers stay where they are, temporary ones too. Batches are copied into theirs before a launch, losses are read
  after it. What kernels need besides comes from a pool that the graphs of an engine share, for no two run at once.
* Learning rate, loss scale and step count are read on the device by every launch. The optimizer's other
  hyper-parameters are read on the host: a section that meets changed ones is captured anew, which takes as long as
  several steps.
* A step that is recorded (``Engine.record``) is issued op by op. Profilers see a graph's kernels without the names of
  their ops, and torch's watchdog does not see its collectives: a rank that is gone is noticed by the heartbeat alone.
* A section that fails while it is captured has done nothing, so it is issued op by op instead, from then on and on
  every rank; a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from zeroir.errors import GraphWarning, ZeroirError
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.effects import effects
from zeroir.ir.mesh import HOST, Executor
from zeroir.ir.program import Program, Section
from zeroir.runtime.comm.job import Backend, Job
from zeroir.runtime.rank_memory import RankMemory

WARM_UP: Final = 2
"""How often a section is issued op by op before it is captured: libraries, communicators and kernels are set up in the
first time, which may not be captured, and the second finds all of it there."""

_ON_HOST: Final = frozenset({Backend.GLOO, Backend.PEER_MEMORY})


def why_not(program: Program, section: Section, backend: Backend = Backend.LOCAL) -> str | None:
    """Why a section of a program cannot be a graph when that backend carries its collectives; None where it can."""
    if not section.body:
        return "it is empty"
    for state in (section.entry, section.exit):
        if state.pending:
            return f"!{state.pending[0].event} is under way where it begins or ends"
    on_host = {s.name: s.executor for s in program.streams if s.executor is not Executor.DEVICE}
    for op in section.body:
        found = effects(op)
        if found.stream == HOST:
            return f"the host waits in it for !{found.waits[0]}"
        if found.stream in on_host:
            return f"the {on_host[found.stream]} works in it, on stream {found.stream}"
        if found.comm is not None and backend in _ON_HOST:
            return f"{backend} moves data in the host's memory"
        if isinstance(op, ops.OptimizerStep) and _asks_for_the_step(program, op):
            return "momentum with dampening asks the device for the step count"
        for name in _buffers(op):
            buffer = program.buffer_by_name[name]
            if buffer.space is not Space.DEVICE:
                is_seeds = buffer.role is Role.RNG
                what = "the seeds of its dropout" if is_seeds else f"%{name}, which it uses,"
                return f"{what} {'are' if is_seeds else 'is'} in the memory of the {buffer.space}"
    return None


def _asks_for_the_step(program: Program, op: ops.OptimizerStep) -> bool:
    if op.algorithm is not ops.Algorithm.MOMENTUM:
        return False
    values = next((s.values for s in program.scalars if s.buffer == op.hyper.buffer), ())
    momentum, dampening, *_ = values[op.hyper.offset : op.hyper.stop] or (0.0, 0.0)
    return momentum != 0.0 and dampening != 0.0


def _buffers(op: ops.Op) -> Iterator[str]:
    """The buffers that an op uses, begins or ends, but for hyper-parameters, which are settled in a graph."""
    found = effects(op)
    for region in (*found.reads, *found.writes, *found.accumulates):
        if not (isinstance(op, ops.OptimizerStep) and region == op.hyper):
            yield region.buffer
    yield from found.allocs
    yield from found.frees


class ReplayableGraph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Do it again, once everything before is done."""

    def reset(self) -> None:
        """Give it up."""


class Capturer(Protocol):
    """Streams that can be captured."""

    def capture(self, issue: Callable[[], None]) -> ReplayableGraph:
        """Capture what ``issue`` submits instead of carrying it out; RuntimeError where that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedSection:
    """A section's graph, and the hyper-parameters that are settled in it."""

    graph: ReplayableGraph
    settled: tuple[float, ...]


class SectionGraphs:
    """Runs the sections of an engine, by graphs where that can be. Every rank of a job calls this alike."""

    def __init__(self, program: Program, streams: Capturer, memory: RankMemory, job: Job) -> None:
        self._streams = streams
        self._memory = memory
        self._job = job
        self._refused: dict[str, str] = {}
        for section in program.sections:
            reason = why_not(program, section, job.backend)
            if reason is not None:
                self._refused[section.name] = reason
        self._hyper = {
            section.name: sorted(
                {op.hyper.buffer for op in section.body if isinstance(op, ops.OptimizerStep)}
            )
            for section in program.sections
        }
        self._issued: dict[str, int] = {}
        self._captured: dict[str, _CapturedSection] = {}
        # Where there is nothing to do, nothing is missed.
        missed = {n: why for n, why in self._refused.items() if program.section_by_name[n].body}
        if missed:
            self._warn(missed)

    @property
    def captured(self) -> frozenset[str]:
        """The sections that run as graphs by now."""
        return frozenset(self._captured)

    def run(self, section: Section, issue: Callable[[], None]) -> None:
        """Carry out a section, whose ops ``issue`` submits; joints before and after it are the caller's."""
        name = section.name
        if name in self._refused:
            issue()
            return
        settled = self._settled(name)
        found = self._captured.get(name)
        if found is None and self._issued.get(name, 0) < WARM_UP:
            self._issued[name] = self._issued.get(name, 0) + 1
            issue()
            return
        if found is None or found.settled != settled:
            found = self._capture(section, issue, settled)
        if found is None:
            issue()
        else:
            found.graph.replay()
            self._memory.settle(section.exit.live)

    def close(self) -> None:
        """Give the graphs up, which hold memory and communicators."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def _settled(self, name: str) -> tuple[float, ...]:
        """The hyper-parameters on the host that the section reads now."""
        buffers = (self._memory.buffer(buffer) for buffer in self._hyper[name])
        return tuple(value for buffer in buffers for value in buffer.tolist())

    def _capture(
        self, section: Section, issue: Callable[[], None], settled: tuple[float, ...]
    ) -> _CapturedSection | None:
        name = section.name
        graph, reason = None, "another rank could not be captured"
        try:
            graph = self._streams.capture(issue)
        except (RuntimeError, ZeroirError) as error:
            cause = error.__cause__ if error.__cause__ is not None else error
            reason = f"capturing it failed: {(str(cause) or type(cause).__name__).splitlines()[0]}"
        # Some libraries set collectives up while they are captured, so it is every rank or none.
        is_captured = self._job.average(0.0 if graph is None else 1.0) == 1.0
        if is_captured and graph is not None:
            found = self._captured[name] = _CapturedSection(graph=graph, settled=settled)
            return found
        self._memory.settle(section.entry.live)
        if graph is not None:
            graph.reset()
        if name in self._captured:
            self._captured.pop(name).graph.reset()
        self._refused[name] = reason
        self._warn({name: reason})
        return None

    def _warn(self, reasons: dict[str, str]) -> None:
        if self._job.rank != 0:
            return
        said = "; ".join(f"{name}, because {reason}" for name, reason in reasons.items())
        warnings.warn(
            f"Sections that run op by op, without a CUDA graph: {said}.", GraphWarning, stacklevel=3
        )
