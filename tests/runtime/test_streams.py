"""Threads as streams: order where a wait demands it, failures that reach the issuing thread at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import HOST
from zeroir.ir.program import LAST_MICRO_STEP, OpPosition
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.execution.trace import Task


class Recorder:
    """Carries ops out by writing down their value, after what the test wants to happen first."""

    def __init__(self, before: dict[float, Callable[[], object]] | None = None) -> None:
        self.seen: list[float] = []
        self._before = before or {}

    def __call__(self, op: ops.Op) -> None:
        assert isinstance(op, ops.Fill)
        self._before.get(op.value, lambda: None)()
        self.seen.append(op.value)


def fill(value: float, stream: str, event: str | None = None) -> ops.Fill:
    region = Region(buffer="x", offset=0, numel=1)
    return ops.Fill(destination=region, value=value, stream=stream, event=event)


class Streams(ThreadStreams):
    """Threads that a recorder sees the ops of."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder_of_ops = recorder

    def submit(self, op: ops.Op) -> None:
        """Enqueue an op once."""
        self.bind(op, lambda: self._recorder_of_ops(op))()


def fail() -> None:
    raise RuntimeError("no more")


def test_a_wait_orders_two_streams() -> None:
    gate = threading.Event()
    recorder = Recorder({1.0: gate.wait})
    streams = Streams(recorder)
    streams.submit(fill(1.0, "gather", "0"))
    streams.submit(ops.Wait(waited="0", on="reduce"))
    streams.submit(fill(2.0, "reduce", "1"))
    streams.submit(fill(3.0, "compute"))
    gate.set()
    streams.submit(ops.Wait(waited="1", on="compute"))
    streams.submit(fill(4.0, "compute"))
    streams.join([])
    streams.close()
    assert recorder.seen == [3.0, 1.0, 2.0, 4.0]


def test_a_boundary_leaves_pending_events_alone() -> None:
    gate = threading.Event()
    recorder = Recorder({2.0: gate.wait})
    streams = Streams(recorder)
    streams.submit(fill(1.0, "gather"))
    streams.submit(fill(2.0, "gather", "0"))
    streams.join(["0"])
    assert recorder.seen == [1.0]
    streams.submit(fill(3.0, "compute"))
    gate.set()
    streams.submit(ops.Wait(waited="0", on=HOST))
    streams.submit(fill(4.0, "compute"))
    streams.join([])
    streams.close()
    assert recorder.seen == [1.0, 3.0, 2.0, 4.0]


def test_a_failure_wakes_whoever_waits_for_another_stream() -> None:
    stuck = threading.Event()
    recorder = Recorder({1.0: stuck.wait, 2.0: fail})
    streams = Streams(recorder)
    streams.submit(fill(1.0, "gather", "0"))
    streams.submit(fill(2.0, "reduce"))
    with pytest.raises(RuntimeError, match="no more"):
        streams.submit(ops.Wait(waited="0", on="compute"))
    assert 1.0 not in recorder.seen
    stuck.set()
    streams.close()


def test_what_is_watched_is_seen_where_it_is_done() -> None:
    """Ops and waits, of the issuing thread and of others; those that are bound unwatched are not seen."""
    issuing = threading.get_ident()
    seen: list[tuple[OpPosition, bool]] = []

    def watch(position: OpPosition, _: ops.Op, run: Task) -> Task:
        def watched() -> None:
            run()
            seen.append((position, threading.get_ident() == issuing))

        return watched

    body: list[tuple[ops.Op, bool]] = [
        (fill(1.0, "gather", "0"), False),
        (ops.Wait(waited="0", on="reduce"), False),
        (fill(2.0, "reduce", "1"), False),
        (ops.Wait(waited="1", on="compute"), True),
        (fill(3.0, "compute"), True),
    ]
    streams = ThreadStreams()
    bound = [streams.bind(op, lambda: None) for op, _ in body]
    positions = [OpPosition(LAST_MICRO_STEP, index) for index in range(len(body))]
    watched = [
        streams.bind(op, lambda: None, partial(watch, position, op))
        for position, (op, _) in zip(positions, body, strict=True)
    ]
    all_seen = [(at, is_issuing) for at, (_, is_issuing) in zip(positions, body, strict=True)]
    for tasks, expected in ((bound, []), (watched, all_seen), (bound, all_seen)):
        for task in tasks:
            task()
        streams.join([])
        assert seen == expected
    streams.close()


def test_nothing_runs_after_a_failure() -> None:
    recorder = Recorder({1.0: fail})
    streams = Streams(recorder)
    streams.submit(fill(1.0, "gather", "0"))
    streams.submit(fill(2.0, "gather"))
    with pytest.raises(RuntimeError, match="no more"):
        streams.join([])
    with pytest.raises(RuntimeError, match="no more"):
        streams.submit(fill(3.0, "compute"))
    streams.close()
    assert recorder.seen == []
