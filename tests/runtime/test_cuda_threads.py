"""Copies that wait for the host are issued by threads: the thread that issues the ops of the program never waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.support.clocks import Clocks
from tests.support.covering import covering
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.analysis.threaded_streams import threaded_streams
from zeroir.ir.mesh import HOST, OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes.base import Pass
from zeroir.passes.common.update_streams import UPDATE_IN, UPDATE_OUT
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.runtime.execution.cuda import CudaStreams

CUDA = torch.device("cuda")
PATIENCE_S = 20.0


class Event:
    """What is done when the stream comes to it: how many ops of each stream."""

    def __init__(self, done: Counter[str]) -> None:
        self.done = done

    def synchronize(self) -> None:
        """A device that does at once what is issued keeps nobody waiting."""


class Stream:
    """A queue of the device; its thread-local successor is the current stream of a thread."""

    current = threading.local()

    def __init__(self, _: object = None) -> None:
        self.waited: Counter[str] = Counter()

    def record_event(self) -> Event:
        return Event(Counter(self.waited))

    def wait_event(self, event: Event) -> None:
        self.waited |= event.done

    @classmethod
    @contextlib.contextmanager
    def using(cls, stream: Stream | None) -> Iterator[None]:
        before = getattr(cls.current, "stream", None)
        cls.current.stream = stream
        try:
            yield
        finally:
            cls.current.stream = before


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    own = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: own)
    monkeypatch.setattr(torch.cuda, "stream", Stream.using)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


class Run:
    """Issues the ops of a program. Ops of the stream ``optimizer`` wait until ``may_update`` is set."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.streams = CudaStreams(program, CUDA)
        self.executors = {s.name: s.executor.value for s in program.streams}
        self.may_update = threading.Event()
        self.lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.computed = 0
        self.early: list[tuple[Op, str]] = []
        self.clocks = Clocks()

    def section(self, name: str) -> None:
        section = self.program.section_by_name[name]
        entering = [pending.event for pending in section.entry.pending]
        self.streams.join(entering)
        self.clocks.join(entering)
        signalled: dict[str, tuple[str, int]] = {}
        waits: dict[str, list[tuple[str, int]]] = {}
        for op in section.body:
            needed = {} if isinstance(op, ops.Wait) else dict(self.clocks.clock(op.stream))
            needed.pop(HOST, None)
            self.clocks.issue(op)
            awaited: list[tuple[str, int]] = []
            if isinstance(op, ops.Wait):
                if op.waited in signalled:
                    waits.setdefault(op.on, []).append(signalled[op.waited])
            else:
                awaited = waits.pop(op.stream, [])
                if op.event is not None and self.executors[op.stream] == "device":
                    signalled[op.event] = op.stream, self.clocks.clock(op.stream)[op.stream]
            self.streams.bind(op, partial(self._execute, op, needed, awaited))()

    def join(self, name: str) -> None:
        leaving = [p.event for p in self.program.section_by_name[name].exit.pending]
        self.streams.join(leaving)
        self.clocks.join(leaving)

    def _execute(self, op: Op, needed: dict[str, int], awaited: list[tuple[str, int]]) -> None:
        """All that ``needed`` names was issued before, and the device waits for the ops that ``awaited`` names."""
        assert not isinstance(op, ops.Wait)
        is_of_host = self.executors[op.stream] != "device"
        if is_of_host:
            assert self.may_update.wait(PATIENCE_S)
        with self.lock:
            self.early += [(op, name) for name, n in needed.items() if self.done[name] < n]
            if not is_of_host:
                stream: Stream = Stream.current.stream
                self.early += [(op, name) for name, n in awaited if stream.waited[name] < n]
                stream.waited[op.stream] += 1
            self.done[op.stream] += 1
            self.computed += isinstance(op, ops.Compute)


def offloaded(
    stage: int, *, clip: float | None, gradients: bool, speculates: bool = False
) -> Program:
    passes = for_stage(stage, 4, overlap_update=clip is None)
    further: tuple[Pass, ...] = (OffloadGradients(),) if gradients else ()
    further += (SpeculateUpdate(),) if speculates else ()
    return applied(
        mlp(blocks=4, precision="bf16", clip=clip),
        (*passes, OffloadOptimizer(), *further, SaveState()),
    )


UPDATES: list[tuple[int, float | None, bool, bool]] = [
    (stage, clip, gradients, speculates)
    for stage in range(4)
    for clip, speculates in ((None, False), (1.0, False), (1.0, True))
    for gradients in (False, True)
]


SOME_UPDATES = covering(UPDATES, lambda case: case)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "clip", "gradients", "speculates"), SOME_UPDATES)
def test_the_issuing_thread_waits_for_no_update_of_the_host(
    stage: int, clip: float | None, gradients: bool, speculates: bool
) -> None:
    """The whole backward is issued while the host has updated nothing; then all ops run in the program's order."""
    program = offloaded(stage, clip=clip, gradients=gradients, speculates=speculates)
    run = Run(program)
    body = program.section_by_name[LAST_MICRO_STEP].body
    computes = sum(isinstance(op, ops.Compute) for op in body)
    thread = threading.Thread(target=run.section, args=(LAST_MICRO_STEP,), daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while run.computed < computes:
        assert time.monotonic() < deadline, "a computation waits for the optimizer"
        time.sleep(0.01)
    assert run.done[OPTIMIZER] == 0
    run.may_update.set()
    thread.join(PATIENCE_S)
    run.join(LAST_MICRO_STEP)
    run.section(UPDATE)
    run.join(UPDATE)
    for _ in range(2):
        for name in (LAST_MICRO_STEP, UPDATE):
            run.section(name)
            run.join(name)
    run.streams.close()
    assert run.early == []
    of_step = [op for op in program.step_ops() if not isinstance(op, ops.Wait)]
    assert run.done == Counter({s: 3 * n for s, n in Counter(op.stream for op in of_step).items()})


def test_streams_of_copies_that_wait_for_the_host_have_threads_and_no_others() -> None:
    assert threaded_streams(offloaded(3, clip=1.0, gradients=False)) == {UPDATE_IN, UPDATE_OUT}
    # No gradient waits for the buffer of another one, because all of them stay for the commit.
    speculative = offloaded(3, clip=1.0, gradients=False, speculates=True)
    assert threaded_streams(speculative) == {UPDATE_IN}
    assert threaded_streams(applied(mlp(), (*for_stage(3, 4), SaveState()))) == frozenset()


def test_a_failure_of_the_host_reaches_the_issuing_thread() -> None:
    program = offloaded(3, clip=None, gradients=False)
    streams = CudaStreams(program, CUDA)

    def execute(op: Op) -> None:
        if isinstance(op, ops.OptimizerStep):
            raise RuntimeError("the host ran out of memory")

    for op in program.section_by_name[LAST_MICRO_STEP].body:
        streams.bind(op, partial(execute, op))()
    with pytest.raises(RuntimeError, match="the host ran out of memory"):
        streams.join([])
    streams.close()


def test_every_thread_is_on_the_device_before_it_uses_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a thread that is on device 0, the end of a block on a stream of another device makes a context on device 0."""
    on_device, elsewhere = {threading.get_ident()}, set[str]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: on_device.add(threading.get_ident()))

    def note(*_: object) -> None:
        """The order of ops is of no interest here."""
        if threading.get_ident() not in on_device:
            elsewhere.add(threading.current_thread().name)

    using = Stream.using

    def noted(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
        note()
        return using(stream)

    monkeypatch.setattr(torch.cuda, "stream", noted)
    monkeypatch.setattr(Stream, "wait_event", note)
    program = offloaded(3, clip=None, gradients=False)
    run = Run(program)
    run.may_update.set()
    for name in (LAST_MICRO_STEP, UPDATE, LAST_MICRO_STEP):
        run.section(name)
        run.join(name)
    run.streams.close()
    assert len(on_device) > 1 + len(threaded_streams(program))
    assert not elsewhere


def test_the_end_of_all_ops_is_also_that_of_the_devices_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host reads and writes pinned memory itself, and no stream orders that."""
    program = offloaded(3, clip=None, gradients=False)
    run = Run(program)
    done: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append(run.done.total()))
    run.section(LAST_MICRO_STEP)
    run.may_update.set()
    run.streams.finish()
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert done == [sum(not isinstance(op, ops.Wait) for op in body)]
    run.streams.close()
