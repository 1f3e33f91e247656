"""The streams and events of a program on a device beside the host, each of which is a stream or event of its driver.

Streams that the host or a disk executes have a worker thread. A device cannot wait for a thread, so a thread that
issues ops of a device stream which must wait for a worker waits itself. Copy streams have their own threads for that:
these wait for the host's ops, issue the copies and record their events, while the issuing thread continues. The issuing
thread itself waits only until such a copy is issued, where a compute or communication stream needs its result.

Submitted ops can be captured as a graph instead of run (``CudaStreams.capture``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch

from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.threaded_streams import threaded_streams
from zeroir.ir.mesh import COMPUTE, HOST, Executor
from zeroir.ir.ops import IssuedOp, Op, Wait
from zeroir.ir.program import Program
from zeroir.runtime.device.driver import driver
from zeroir.runtime.device.interface import (
    DeviceCapture,
    DeviceEvent,
    DeviceGraph,
    DeviceGraphPool,
    DeviceStream,
)
from zeroir.runtime.execution.cuda_events import (
    Event,
    LateEvent,
    PendingSignal,
    recorded,
    synchronize,
    under_way,
)
from zeroir.runtime.execution.host_threads import use_update_threads
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.execution.trace import HostClock, Mark, Task, WatchOp


class CudaClock:
    """Marks times of a device stream by events on the current stream, and of other streams by the host's clock."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._on_device = frozenset(
            stream.name for stream in program.streams if stream.executor is Executor.DEVICE
        )
        self._host = HostClock()
        self._first = driver().timed_event()
        driver().synchronize(device)
        self._first.record()
        self._first.synchronize()
        self._first_ns = time.perf_counter_ns()

    def mark(self, stream: str) -> Mark:
        if stream not in self._on_device:
            return self._host.mark(stream)
        event = driver().timed_event()
        event.record()

        def when() -> int:
            event.synchronize()
            elapsed_ms: float = self._first.elapsed_time(event)
            return self._first_ns + round(elapsed_ms * 1e6)

        return when


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CudaGraph:
    """A captured graph, the stream on which it is launched, and ``wait``, which orders that stream after other work."""

    graph: DeviceGraph
    stream: DeviceStream
    wait: Task

    def replay(self) -> None:
        """Launch the captured ops on the stream."""
        self.wait()
        with driver().on(self.stream):
            self.graph.replay()

    def reset(self) -> None:
        """Release the graph, once the device has finished it."""
        self.stream.synchronize()
        self.graph.reset()


class CudaStreams:
    """Streams of one process on one device."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, DeviceStream] = {}
        on_host: set[str] = set()
        used = {COMPUTE, *(effects(op).stream for op in program.ops())}
        for stream in program.streams:
            match stream.executor:
                case Executor.DEVICE if stream.name == COMPUTE:
                    # The user's own work runs on it as well, unless the user changes the current stream.
                    self._streams[stream.name] = driver().current_stream(device)
                case Executor.DEVICE:
                    if stream.name in used:
                        self._streams[stream.name] = driver().new_stream(device)
                case Executor.HOST | Executor.DISK:
                    on_host.add(stream.name)
                case _:
                    assert_never(stream.executor)
        self._host_streams = frozenset(on_host)
        self._threads = ThreadStreams(inline=())
        self._thread = threading.local()
        self._apart = threaded_streams(program)
        self._tails: dict[str, LateEvent] = {}
        """For each stream that a thread issues, the event of its last op that is not pending across sections."""
        self._events: dict[str, Event] = {}
        self._crossing = frozenset(p.event for s in program.sections for p in s.exit.pending)
        self._last: dict[str, list[PendingSignal]] = {name: [] for name in self._streams}
        self._boundary: dict[str, tuple[DeviceEvent, ...]] = {}
        """For each host stream without an op since the last boundary, the device's events that it has to wait for."""
        self._before_capture: Mapping[str, Event] = {}
        """The events that were signalled before the current capture."""
        self._awaited: list[str] = []
        """Those of them for which the captured ops wait."""
        self._graph_pool: DeviceGraphPool | None = None
        self._capture_stream: DeviceStream | None = None

    def stream(self, name: str) -> DeviceStream:
        """Return the device's stream of that name."""
        return self._streams[name]

    def bind(self, op: Op, run: Task, watch: WatchOp | None = None) -> Task:
        match op:
            case Wait():
                return self._waiting(op, watch)
            case _ if op.stream in self._host_streams:
                enqueue = self._threads.bind(op, partial(self._on_host, run), watch)
                return lambda: self._hand_over(op.stream, op.event, enqueue)
            case _ if op.stream in self._apart:
                return self._issued_by_thread(op, run if watch is None else watch(run))
            case _:
                task = run if watch is None else watch(run)
                return lambda: self._on_device(op.stream, op.event, task)

    def join(self, pending: Collection[str]) -> None:
        """Order later ops after earlier ones, as ``Streams.join`` requires. The host does not wait for the device."""
        self._threads.join([name for name in pending if self._is_of_thread(name)])
        signals: dict[str, DeviceEvent] = {}
        for name, stream in self._streams.items():
            crossing = self._last[name] = under_way(self._last[name], pending)
            before = recorded(crossing[0].before) if crossing else stream.record_event()
            if before is not None:
                signals[name] = before
        # A host stream waits for the device where it has an op after the boundary.
        self._boundary = dict.fromkeys(self._host_streams, tuple(signals.values()))
        for name, stream in self._streams.items():
            for signalling, signal in signals.items():
                if signalling == name:
                    continue
                if name in self._apart:
                    wait = partial(stream.wait_event, signal)
                    self._threads.call(name, partial(self._in_thread, wait))
                else:
                    stream.wait_event(signal)

    def finish(self) -> None:
        """Wait until all ops are done, on the device as well: it executes the copies to and from pinned memory."""
        self._threads.join(())
        driver().synchronize(self._device)

    def signal(self, event: str) -> None:
        self._events[event] = self._streams[COMPUTE].record_event()

    def waiting_for(self, events: Collection[str]) -> Task:
        of_device = [self._events[name] for name in events if name in self._events]
        of_device.append(self._streams[COMPUTE].record_event())
        wait_for_threads = self._threads.waiting_for(
            [name for name in events if self._is_of_thread(name)]
        )

        def wait() -> None:
            wait_for_threads()
            for event in of_device:
                if (arrived := recorded(event)) is not None:
                    arrived.synchronize()

        return wait

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Order the block between the caller's work on its current stream, which may differ from the compute stream."""
        own, callers = self._streams[COMPUTE], driver().current_stream(self._device)
        if own == callers:
            yield
            return
        own.wait_event(callers.record_event())
        with driver().on(own):
            yield
        callers.wait_event(own.record_event())

    def close(self) -> None:
        self._threads.close()

    def capture(self, issue: Callable[[], None]) -> CudaGraph:
        """Capture the ops that ``issue`` submits, on all streams, instead of running them.

        The caller joins the streams before and after. Where the ops wait for events that were pending before, the whole
        graph waits for them at each launch. All graphs of this object allocate from one pool, so no two may run at
        once, and each overwrites the results of the others.

        Raises:
            RuntimeError: where something cannot be captured; then nothing was run.
        """
        if self._graph_pool is None or self._capture_stream is None:
            self._graph_pool = driver().new_graph_pool()
            # A default stream cannot be captured, and compute may be one, so another stream replaces it.
            self._capture_stream = driver().new_stream(self._device)
        own, events = self._streams, dict(self._events)
        last = {name: list(ops) for name, ops in self._last.items()}
        self._streams = {**own, COMPUTE: self._capture_stream}
        self._before_capture, self._awaited = events, []
        try:
            with driver().on(self._capture_stream):
                capture = self._graph_pool.begin_capture(self._capture_stream)
                graph = self._captured(capture, issue)
        finally:
            # Events that were recorded in a capture are invalid outside it.
            self._streams, self._events, self._last = own, events, last
            self._before_capture = {}

        awaited = self._awaited

        def wait() -> None:
            for name in awaited:
                self._order(own[COMPUTE], name)

        return CudaGraph(graph=graph, stream=own[COMPUTE], wait=wait)

    def _captured(self, capture: DeviceCapture, issue: Callable[[], None]) -> DeviceGraph:
        try:
            self._fork()
            issue()
            self._rejoin()
            return capture.end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._rejoin()
            capture.abandon()
            raise

    def _fork(self) -> None:
        """Make all streams join the capture, except those of threads, whose copies to or from the host no graph has."""
        begin = self._streams[COMPUTE].record_event()
        for name, stream in self._streams.items():
            if name != COMPUTE and name not in self._apart:
                stream.wait_event(begin)

    def _rejoin(self) -> None:
        """Order the capture's first stream after all others, as a device requires at its end."""
        for name, stream in self._streams.items():
            if name != COMPUTE and name not in self._apart:
                self._streams[COMPUTE].wait_event(stream.record_event())

    def _on_device(self, name: str, event: str | None, run: Task) -> None:
        stream = self._streams[name]
        if event in self._crossing:
            # A join excludes an op that may still be pending, but not the earlier ops of its stream.
            self._last[name].append(PendingSignal(event=event, before=stream.record_event()))
        else:
            self._last[name].clear()
        with driver().on(stream):
            run()
        if event is not None:
            self._events[event] = stream.record_event()

    def _hand_over(self, stream: str, event: str | None, enqueue: Task) -> None:
        for signal in self._boundary.pop(stream, ()):
            self._threads.call(stream, signal.synchronize)
        # Another section may have used the name for an event of the device.
        self._events.pop(event or "", None)
        enqueue()

    def _issued_by_thread(self, op: IssuedOp, task: Task) -> Task:
        """Pass the op to the stream's thread, which issues it and records its event."""
        events: deque[LateEvent] = deque()

        def issue() -> None:
            stream = self._streams[op.stream]
            with driver().on(stream):
                task()
            events.popleft().recorded = stream.record_event()

        enqueue = self._threads.bind(op, partial(self._in_thread, issue))

        def hand_over() -> None:
            event = LateEvent()
            events.append(event)
            if op.event in self._crossing:
                before = self._tails.get(op.stream, LateEvent())
                self._last[op.stream].append(PendingSignal(event=op.event, before=before))
            else:
                self._last[op.stream].clear()
                self._tails[op.stream] = event
            if op.event is not None:
                self._events[op.event] = event
            enqueue()

        return hand_over

    def _is_of_thread(self, name: str) -> bool:
        """Return whether a thread runs or issues the op that signals the event."""
        return isinstance(self._events.get(name, LateEvent()), LateEvent)

    def _waiting(self, op: Wait, watch: WatchOp | None) -> Task:
        if op.on in self._apart:
            return lambda: self._wait_in_thread(op, watch)
        on = op.on if op.on in self._host_streams else HOST
        of_threads = self._threads.bind(
            Wait(waited=op.waited, on=on),
            _nothing,
            watch,
        )

        def wait() -> None:
            event = self._events.get(op.waited)
            if event is not None and event is self._before_capture.get(op.waited):
                # No graph has a wait for work outside it.
                self._awaited.append(op.waited)
                return
            if self._is_of_thread(op.waited):  # run or issued by it
                # The watch marks moments on the current stream.
                with driver().on(self._streams.get(op.on)):
                    of_threads()
            if event is None:
                return
            if op.on in self._host_streams:
                # The worker waits for the device when its turn comes; the issuing thread continues.
                self._threads.call(op.on, partial(synchronize, event))
            elif op.on == HOST:
                synchronize(event)
            else:
                self._order(self._streams[op.on], op.waited)

        return wait

    def _wait_in_thread(self, op: Wait, watch: WatchOp | None) -> None:
        """Make the thread that issues a stream's ops wait for another thread, and the stream for the device."""
        stream, event = self._streams[op.on], self._events.get(op.waited)
        is_of_thread = self._is_of_thread(op.waited)
        wait_for_thread = self._threads.waiting_for([op.waited]) if is_of_thread else _nothing

        def wait() -> None:
            wait_for_thread()
            if (arrived := recorded(event)) is not None:
                stream.wait_event(arrived)

        task = wait if watch is None else watch(wait)

        def on_stream() -> None:
            with driver().on(stream):
                task()

        self._threads.call(op.on, partial(self._in_thread, on_stream))

    def _order(self, stream: DeviceStream, name: str) -> None:
        """Order a stream after an event of the device; the calling thread waits until the event is recorded."""
        if self._is_of_thread(name):
            self._threads.waiting_for([name])()
        event = recorded(self._events[name])
        assert event is not None
        stream.wait_event(event)

    def _on_host(self, run: Task) -> None:
        if not getattr(self._thread, "has_update_threads", False):
            use_update_threads()
            self._thread.has_update_threads = True
        self._in_thread(run)

    def _in_thread(self, task: Task) -> None:
        """Run a task in a worker thread with this process's device current; new threads start with device 0.

        In a thread on device 0, the end of a block on a stream of another device would create a context on device 0,
        which takes hundreds of megabytes there.
        """
        if not getattr(self._thread, "is_on_device", False):
            driver().set_device(self._device)
            self._thread.is_on_device = True
        task()


def _nothing() -> None:
    pass
