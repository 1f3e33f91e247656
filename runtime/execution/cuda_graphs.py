"""Whole sections as CUDA graphs: issued op by op a few times, then captured, and from then on launched in one call.

A graph repeats the captured work of the device, at the same addresses, but not the work of the host. ``why_not``
decides which sections can be graphs. For these the following holds:

* Buffers keep their addresses, temporary ones too. Batches are copied into their buffers before a launch, and losses
  are read after it. Other memory of kernels comes from a pool that the graphs of an engine share; no two run at once.
* Copies between the device and planned host memory are work of the device: that memory is pinned and keeps its address,
  too. Only snapshots are allocated later, at the first save. No other op of a graph uses host memory.
* Every launch reads learning rate, loss scale and step count on the device. The optimizer's other hyper-parameters are
  read on the host. While they change, the section is issued op by op, and once they have been constant for a step it
  is captured again, which takes as long as several steps.
* A section may wait for copies of section ``save``, which overlap with the steps. Its graph as a whole waits
  for them, so after a save it is issued op by op once: then each op waits for its own copy alone.
* A recorded step (``Engine.record``) is issued op by op. Profilers show a graph's kernels without the names of
  their ops. Torch's watchdog does not see a graph's collectives, so only the heartbeat notices a lost rank.
* When the capture of a section fails, nothing was run. From then on every rank issues that section op by op,
  and a warning gives the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from zeroir.errors import GraphWarning, ZeroirError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.threaded_streams import threaded_streams
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.hyper_parameters import first_hyper
from zeroir.ir.mesh import HOST, Executor
from zeroir.ir.program import SAVE, Program, Section
from zeroir.runtime.comm.job import Backend, Job
from zeroir.runtime.kernels.foreign import op_outside_graphs
from zeroir.runtime.memory.rank_memory import RankMemory

WARM_UP: Final = 2
"""How often a section is issued op by op before it is captured. The first run initialises libraries, communicators and
kernels, which cannot be captured; the second run shows that everything is initialised."""

_ON_HOST: Final = frozenset({Backend.GLOO, Backend.PEER_MEMORY, Backend.PEER_MEMORY_AND_GLOO})


def why_not(program: Program, section: Section, backend: Backend = Backend.LOCAL) -> str | None:
    """Return why a section cannot be a graph when this backend runs its collectives; None where it can."""
    if not section.body:
        return "it is empty"
    signalled = {op.event for op in section.body if not isinstance(op, ops.Wait)}
    if section.entry.pending != section.exit.pending:
        event = (*section.entry.pending, *section.exit.pending)[0].event
        return f"!{event} is pending where it begins or ends"
    for pending in section.exit.pending:
        if pending.event in signalled:
            return f"!{pending.event} is pending where it begins or ends"
    on_host = {s.name: s.executor for s in program.streams if s.executor is not Executor.DEVICE}
    apart = threaded_streams(program)
    for op in section.body:
        effect = effects(op)
        if effect.stream == HOST:
            return f"the host waits in it for !{effect.waits[0]}"
        if effect.stream in on_host:
            return f"the {on_host[effect.stream]} works in it, on stream {effect.stream}"
        if effect.stream in apart:
            return f"a thread issues its copies on stream {effect.stream}, which wait for the host"
        if effect.comm is not None and backend in _ON_HOST:
            return f"{backend} moves data in the host's memory"
        if isinstance(op, ops.Compute):
            name = op_outside_graphs(program.segment_by_name[op.segment])
            if name is not None:
                return f"the operator {name} of segment @{op.segment} reads values on the host"
        if isinstance(op, ops.OptimizerStep):
            reasons = map(op.algorithm.declaration.waits, first_hyper(program, op))
            reason = next(filter(None, reasons), None)
            if reason is not None:
                return reason
        for name in _buffers(op):
            buffer = program.buffer_by_name[name]
            if buffer.space is not Space.DEVICE and not _is_pinned_copy(op, buffer):
                is_seeds = buffer.role is Role.RNG
                contents = "the seeds of its dropout" if is_seeds else f"%{name}, which it uses,"
                return (
                    f"{contents} {'are' if is_seeds else 'is'} in the memory of the {buffer.space}"
                )
    return None


def _is_pinned_copy(op: ops.Op, buffer: Buffer) -> bool:
    """Return whether the op copies from or to planned host memory, or allocates or frees it, on the device."""
    is_planned = buffer.space is Space.HOST and buffer.role is not Role.SNAPSHOT
    return is_planned and isinstance(op, ops.Memory | ops.ToHost | ops.ToDevice)


def _buffers(op: ops.Op) -> Iterator[str]:
    """Yield the buffers that an op uses, allocates or frees, except hyper-parameters, which are graph constants."""
    effect = effects(op)
    for region in (*effect.reads, *effect.writes, *effect.accumulates):
        settings = op.settings if isinstance(op, ops.StepOp) else ()
        if not any(region == s.hyper for s in settings):
            yield region.buffer
    yield from effect.allocs
    yield from effect.frees


def _waiting_sections(program: Program) -> Mapping[str, frozenset[str]]:
    """Return for each section the others that wait for an event which it signals and leaves pending."""
    waiting: dict[str, set[str]] = {}
    for section in program.sections:
        for op in section.body:
            if isinstance(op, ops.Wait):
                waiting.setdefault(op.waited, set()).add(section.name)
    sections: dict[str, frozenset[str]] = {}
    for section in program.sections:
        signalled = {op.event for op in section.body if not isinstance(op, ops.Wait)}
        events = [p.event for p in section.exit.pending if p.event in signalled]
        others = {name for event in events for name in waiting.get(event, ())}
        sections[section.name] = frozenset(others - {section.name})
    return sections


class ReplayableGraph(Protocol):
    """A captured section."""

    def replay(self) -> None:
        """Repeat its work, after all work submitted before."""

    def reset(self) -> None:
        """Release its resources."""


class Capturer(Protocol):
    """Streams that can be captured."""

    def capture(self, issue: Callable[[], None]) -> ReplayableGraph:
        """Capture the ops that ``issue`` submits instead of running them.

        Raise RuntimeError where that is impossible.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedSection:
    """A section's graph, and the hyper-parameters that are constants in it."""

    graph: ReplayableGraph
    hyper: tuple[float, ...]


class SectionGraphs:
    """Runs the sections of an engine, as graphs where possible. All ranks of a job call this together."""

    def __init__(self, program: Program, streams: Capturer, memory: RankMemory, job: Job) -> None:
        self._streams = streams
        self._memory = memory
        self._job = job
        self._refused: dict[str, str] = {}
        for section in program.sections:
            reason = why_not(program, section, job.backend)
            if reason is not None:
                self._refused[section.name] = reason
        self._hyper_buffers = {
            section.name: sorted(
                {
                    settings.hyper.buffer
                    for op in section.body
                    if isinstance(op, ops.StepOp)
                    for settings in op.settings
                }
            )
            for section in program.sections
        }
        self._issued: dict[str, int] = {}
        self._last_hyper: dict[str, tuple[float, ...]] = {}
        self._captured: dict[str, _CapturedSection] = {}
        self._waiting = _waiting_sections(program)
        self._not_as_graph: set[str] = set()
        """The sections to issue op by op in their next run, because a save has started."""
        # An empty section needs no graph, and a section that saves runs rarely.
        worth_a_warning = {
            name: reason
            for name, reason in self._refused.items()
            if program.section_by_name[name].body and name != SAVE
        }
        if worth_a_warning:
            self._warn(worth_a_warning)

    @property
    def captured(self) -> frozenset[str]:
        """The sections that run as graphs at present."""
        return frozenset(self._captured)

    def run(self, section: Section, issue: Callable[[], None]) -> None:
        """Run a section, whose ops ``issue`` submits; the caller joins the streams before and after."""
        name = section.name
        # All ranks save together, so all issue the same sections op by op, which NCCL requires.
        self._not_as_graph |= self._waiting.get(name, frozenset())
        if name in self._refused or name in self._not_as_graph:
            self._not_as_graph.discard(name)
            issue()
            return
        hyper = self._hyper_parameters(name)
        is_settled = self._last_hyper.get(name, hyper) == hyper
        self._last_hyper[name] = hyper
        captured = self._captured.get(name)
        if captured is None or captured.hyper != hyper:
            if not is_settled or self._issued.get(name, 0) < WARM_UP:
                self._issued[name] = self._issued.get(name, 0) + 1
                issue()
                return
            captured = self._capture(section, issue, hyper)
        if captured is None:
            issue()
        else:
            captured.graph.replay()
            self._memory.settle(section.exit.live)

    def close(self) -> None:
        """Release the graphs, which hold memory and communicators."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def _hyper_parameters(self, name: str) -> tuple[float, ...]:
        """Return the present hyper-parameters, on the host, of the section's updates."""
        buffers = (self._memory.buffer(buffer) for buffer in self._hyper_buffers[name])
        return tuple(value for buffer in buffers for value in buffer.tolist())

    def _capture(
        self, section: Section, issue: Callable[[], None], hyper: tuple[float, ...]
    ) -> _CapturedSection | None:
        name = section.name
        graph, reason = None, "the capture failed on another rank"
        try:
            graph = self._streams.capture(issue)
        except (RuntimeError, ZeroirError) as error:
            cause = error.__cause__ if error.__cause__ is not None else error
            reason = f"capturing it failed: {(str(cause) or type(cause).__name__).splitlines()[0]}"
        # Some libraries initialise collectives during the capture, so either all ranks capture or none does.
        is_captured = self._job.average(0.0 if graph is None else 1.0) == 1.0
        if is_captured and graph is not None:
            if name in self._captured:
                self._captured[name].graph.reset()
            captured = self._captured[name] = _CapturedSection(graph=graph, hyper=hyper)
            return captured
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
        sections = "; ".join(f"{name}, because {reason}" for name, reason in reasons.items())
        warnings.warn(
            f"Sections that run op by op, without a CUDA graph: {sections}.",
            GraphWarning,
            stacklevel=3,
        )
