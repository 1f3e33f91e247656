"""CUDA's streams and events as the program uses them, with stand-ins that only note what comes after what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from tests.runtime.support import lowered
from tests.support.clocks import Clocks
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COMPUTE, COPY_OUT, GATHER, HOST, REDUCE
from zeroir.ir.ops import Op
from zeroir.ir.program import Pending, Program, Section, State
from zeroir.passes.memory.save_state import SAVE_OUT, SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.runtime.execution.cuda import CudaGraph, CudaStreams
from zeroir.runtime.execution.trace import HostClock, Mark, SpanRecorder


@dataclass(eq=False)
class Event:
    """What comes before it: names of streams and how many of their ops."""

    clock: dict[str, int]

    def synchronize(self) -> None:
        for stream in Driver.streams:
            stream.join(self.clock)


@dataclass(eq=False)
class Stream:
    """A queue that knows what its next op comes after."""

    device: object = None
    name: str = ""
    clock: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"stream {len(Driver.streams)}"
        Driver.streams.append(self)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        self.join(event.clock)

    def join(self, clock: dict[str, int]) -> None:
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)


class Driver:
    """The device: every stream there is, and the current one."""

    streams: list[Stream]
    current: Stream

    @classmethod
    @contextlib.contextmanager
    def using(cls, stream: Stream) -> Iterator[None]:
        before, cls.current = cls.current, stream
        try:
            yield
        finally:
            cls.current = before


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver.streams = []
    Driver.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Driver.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Driver.using(stream or Driver.current))


def run(
    program: Program,
) -> tuple[list[tuple[Op, dict[str, int]]], list[tuple[Op, dict[str, int]]]]:
    """For every op what it comes after, on the device and by the program, under the program's stream names."""
    done: list[tuple[Op, Stream, dict[str, int]]] = []

    def execute(op: Op) -> None:
        stream = Driver.current
        done.append((op, stream, dict(stream.clock)))
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    streams = CudaStreams(program, torch.device("cuda"))
    clocks = Clocks()
    expected: list[tuple[Op, dict[str, int]]] = []
    for section in program.sections:
        for pending in (section.entry.pending, section.exit.pending):
            if pending is section.exit.pending:
                for op in section.body:
                    if not isinstance(op, ops.Wait):
                        expected.append((op, dict(clocks.clock(op.stream))))
                    clocks.issue(op)
                    streams.bind(op, partial(execute, op))()
            names = [one.event for one in pending]
            streams.join(names)
            clocks.join(names)
    streams.close()
    names_of = {stream.name: op.stream for op, stream, _ in done if not isinstance(op, ops.Wait)}
    found = [(op, {names_of[s]: n for s, n in clock.items()}) for op, _, clock in done]
    return found, expected


def nonzero(pairs: list[tuple[Op, dict[str, int]]]) -> list[tuple[Op, dict[str, int]]]:
    return [(op, {s: n for s, n in clock.items() if n}) for op, clock in pairs]


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_the_device_orders_what_the_program_orders_and_no_more(
    stage: int, micro_steps: int
) -> None:
    program = lowered(mlp(blocks=4, clip=1.0, micro_steps=micro_steps), stage, 4)
    found, expected = run(program)
    assert nonzero(found) == nonzero(expected)


@pytest.mark.parametrize("overlap_update", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_copies_run_beside_the_steps_and_hold_up_only_what_overwrites(
    stage: int, overlap_update: bool
) -> None:
    program = applied(
        mlp(blocks=2), (*for_stage(stage, 4, overlap_update=overlap_update), SaveState())
    )
    by_name = program.section_by_name
    step = (by_name["last_micro_step"], by_name["update"])
    found, expected = run(
        replace(program, sections=(by_name["save"], *step, by_name["save"], *step))
    )
    assert nonzero(found) == nonzero(expected)
    computed = [clock for op, clock in found if isinstance(op, ops.Compute)]
    assert COPY_OUT not in computed[0]
    updated = [clock for op, clock in found if isinstance(op, ops.OptimizerStep)]
    assert all(clock[COPY_OUT] for clock in updated)


def test_the_forward_after_a_save_waits_for_copies_of_activations_alone() -> None:
    passes = (*for_stage(3, 2), OffloadActivations(smallest=0), SaveState())
    program = applied(mlp(blocks=4), passes)
    by_name = program.section_by_name
    step = (by_name["last_micro_step"], by_name["update"])
    found, _ = run(replace(program, sections=(by_name["save"], *step)))
    copied = [clock for op, clock in found if isinstance(op, ops.ToHost)]
    assert any(SAVE_OUT in clock for clock in copied)
    computed = [clock for op, clock in found if isinstance(op, ops.Compute)]
    assert any(COPY_OUT in clock for clock in computed)
    assert not any(SAVE_OUT in clock for clock in computed)


def fill(stream: str, event: str | None = None, value: float = 0.0) -> ops.Fill:
    region = Region(buffer="x", offset=0, numel=1)
    return ops.Fill(destination=region, value=value, stream=stream, event=event)


def test_what_crosses_a_boundary_holds_nobody_back_but_all_before_it_does() -> None:
    crossing = State(pending=(Pending(event="0", stream=GATHER),))
    first = Section(
        name="last_micro_step", body=(fill(GATHER), fill(GATHER, "0"), fill(REDUCE)), exit=crossing
    )
    second = Section(
        name="update",
        entry=crossing,
        body=(fill(COMPUTE), ops.Wait(waited="0", on=COMPUTE), fill(COMPUTE)),
    )
    found, expected = run(replace(mlp(), sections=(first, second)))
    assert nonzero(found) == nonzero(expected)
    assert found[3][1] == {GATHER: 1, REDUCE: 1}
    assert found[4][1] == {GATHER: 2, REDUCE: 1, COMPUTE: 1}


@pytest.mark.parametrize("again", [False, True])
def test_a_name_may_cross_one_boundary_and_be_another_ops_within_a_section(again: bool) -> None:
    def crossing(event: str) -> State:
        return State(pending=(Pending(event=event, stream=GATHER),))

    body = (fill(GATHER, "b"), fill(GATHER, "a"), *([fill(GATHER, "a")] if again else []))
    first = Section(name="last_micro_step", body=body, exit=crossing("a"))
    second = Section(
        name="update",
        entry=crossing("a"),
        body=(fill(COMPUTE), fill(GATHER, "b"), fill(REDUCE)),
        exit=crossing("b"),
    )
    third = Section(name="evaluate", entry=crossing("b"), body=(fill(COMPUTE),))
    found, expected = run(replace(mlp(), sections=(first, second, third)))
    assert nonzero(found) == nonzero(expected)
    assert found[len(body)][1] == {GATHER: len(body) - 1}


def test_a_step_comes_between_what_its_caller_does_on_another_stream_before_and_after() -> None:
    own = Driver.current
    streams = CudaStreams(mlp(), torch.device("cuda"))
    callers = Stream()
    callers.clock[callers.name] = 3
    with Driver.using(callers):
        with streams.entered():
            assert Driver.current is own
            assert own.clock == {callers.name: 3}
            own.clock[own.name] = 5
        assert Driver.current is callers
    assert callers.clock == {callers.name: 3, own.name: 5}
    streams.close()


def test_a_wait_for_a_thread_is_no_wait_for_an_old_event_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sections call an event 0; the second one's is signalled by a thread, which fails."""
    sections = (
        Section(name="last_micro_step", body=(fill(GATHER, "0"),)),
        Section(name="update", body=(fill("optimizer", "0"), ops.Wait(waited="0", on=HOST))),
    )
    program = replace(mlp(), sections=sections)

    def execute(op: Op) -> None:
        if isinstance(op, ops.Fill) and op.stream == "optimizer":
            raise RuntimeError("from the thread")

    streams = CudaStreams(program, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    (gather,), (on_thread, wait) = (section.body for section in sections)
    streams.bind(gather, partial(execute, gather))()
    streams.join([])
    streams.bind(on_thread, partial(execute, on_thread))()
    with pytest.raises(RuntimeError, match="from the thread"):
        streams.bind(wait, partial(execute, wait))()
    streams.close()


def test_a_watched_wait_for_a_thread_is_seen_as_the_programs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the stream that waits, and not as what stands in for it at the threads, whose place no timeline knows."""
    body = (fill("optimizer", "0"), ops.Wait(waited="0", on=GATHER), fill(GATHER))
    section = Section(name="update", body=body)
    program = replace(mlp(), sections=(section,))
    streams = CudaStreams(program, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    marked: list[Stream] = []

    class Clock(HostClock):
        def mark(self, stream: str) -> Mark:
            if stream == GATHER:
                marked.append(Driver.current)
            return super().mark(stream)

    recorder = SpanRecorder()
    recorder.begin(Clock())
    for position, op in section.positioned_ops():
        streams.bind(op, lambda: None, partial(recorder.watch, position, op))()
    streams.join([])
    streams.close()
    assert [span.index for span in recorder.spans()] == [0, 1, 2]
    assert marked == [stand_in(streams, GATHER)] * 4


# --------------------------------------------------------------------------------------------------- captures


@dataclass(eq=False)
class Graph:
    """What torch is told of a capture; ``end_error`` is raised where it ends."""

    told: list[str] = field(default_factory=list)
    end_error: Exception | None = None
    first: Stream | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool == (0, 1)
        assert capture_error_mode == "thread_local"
        self.told.append("begin")
        self.first = Driver.current

    def capture_end(self) -> None:
        assert Driver.current is self.first
        self.told.append("end")
        if self.end_error is not None:
            raise self.end_error

    def replay(self) -> None:
        self.told.append(f"replay on {Driver.current.name}")

    def reset(self) -> None:
        self.told.append("reset")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    found = Graph()

    def end(*_: object) -> None:
        if found.end_error is None:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        found.told.append("end of allocations")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    released = found.told.append
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda *_: released("release"), raising=False
    )
    return found


def captured(
    *body: Op, failure: Exception | None = None
) -> tuple[CudaStreams, list[tuple[Stream, dict[str, int]]], Callable[[], CudaGraph]]:
    """Streams, what was carried out where and after what, and the capture of a body that fails at its end."""
    done: list[tuple[Stream, dict[str, int]]] = []

    def execute() -> None:
        stream = Driver.current
        done.append((stream, dict(stream.clock)))
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    pending = State(pending=(Pending(event="saved", stream=COPY_OUT),))
    sections = (
        Section(name="last_micro_step", entry=pending, body=body, exit=pending),
        Section(name="save", body=(fill(COPY_OUT, "saved"),), exit=pending),
    )
    streams = CudaStreams(replace(mlp(), sections=sections), torch.device("cuda"))

    def issue() -> None:
        for op in body:
            streams.bind(op, execute)()
        if failure is not None:
            raise failure

    return streams, done, lambda: streams.capture(issue)


def stand_in(streams: CudaStreams, name: str) -> Stream:
    found: object = streams.stream(name)
    assert isinstance(found, Stream)
    return found


def test_a_capture_forks_to_every_stream_and_ends_after_all(graph: Graph) -> None:
    streams, done, capture = captured(
        fill(COMPUTE, "0"), ops.Wait(waited="0", on=GATHER), fill(GATHER), fill(REDUCE)
    )
    own = stand_in(streams, COMPUTE)
    found = capture()
    (first, _), (gather, after), (reduce, _) = done
    assert first is graph.first is not own  # which may be a default stream
    assert (gather, reduce) == (stand_in(streams, GATHER), stand_in(streams, REDUCE))
    assert after == {first.name: 1}
    assert first.clock == {first.name: 1, gather.name: 1, reduce.name: 1}
    assert stand_in(streams, COMPUTE) is own
    found.replay()
    assert graph.told == ["begin", "end", f"replay on {own.name}"]


def test_a_graph_waits_as_a_whole_for_events_of_before_it(graph: Graph) -> None:
    """CUDA cannot capture a wait for work outside a graph; each launch waits for the event's latest signal."""
    streams, done, capture = captured(
        fill(COMPUTE), ops.Wait(waited="saved", on=COMPUTE), fill(COMPUTE, "0")
    )

    def copy() -> None:
        stream = Driver.current
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    copies, own = stand_in(streams, COPY_OUT), stand_in(streams, COMPUTE)
    streams.bind(fill(COPY_OUT, "saved"), copy)()
    found = capture()
    assert all(copies.name not in clock for _, clock in done)
    streams.bind(fill(COPY_OUT, "saved"), copy)()
    assert copies.name not in own.clock
    found.replay()
    assert own.clock[copies.name] == 2
    assert graph.told == ["begin", "end", f"replay on {own.name}"]


def test_events_of_a_capture_are_forgotten(graph: Graph) -> None:
    """Of the names that a capture used none is an event of the device afterwards."""
    streams, _, capture = captured(fill(GATHER, "0"))
    streams.bind(fill(COMPUTE, "1"), lambda: None)()
    capture()
    assert set(streams._events) == {"1"}
    assert graph.told == ["begin", "end"]


def test_a_capture_that_fails_is_ended_and_what_follows_runs_as_before(graph: Graph) -> None:
    streams, _, capture = captured(fill(COMPUTE), failure=RuntimeError("not permitted"))
    own = stand_in(streams, COMPUTE)
    with pytest.raises(RuntimeError, match="not permitted"):
        capture()
    assert graph.told == ["begin", "end", "reset"]
    ran_on: list[Stream] = []
    streams.bind(fill(COMPUTE), lambda: ran_on.append(Driver.current))()
    assert ran_on == [own]
    assert Driver.current is own


def test_a_capture_whose_end_fails_gives_its_memory_back(graph: Graph) -> None:
    graph.end_error = RuntimeError("invalidated")
    _, _, capture = captured(fill(COMPUTE))
    with pytest.raises(RuntimeError, match="invalidated"):
        capture()
    assert graph.told == ["begin", "end", "end", "reset", "end of allocations", "release"]
