"""The streams and events of a program on a CPU: one thread per stream.

The stream ``compute`` runs in the thread that issues the ops, so it needs no core of its own; every other stream has a
worker thread with a FIFO queue. An event is done or failed as soon as its op is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, Protocol

import torch

from zeroir.ir.mesh import COMPUTE, HOST
from zeroir.ir.ops import Alloc, Op, Release, Wait
from zeroir.runtime.execution.trace import Task, WatchOp


class Streams(Protocol):
    """Runs ops in the order that their streams and waits require."""

    def bind(self, op: Op, run: Task, watch: WatchOp | None = None) -> Task:
        """Return a task that enqueues the op on its stream at each call; ``run`` runs the op.

        For a ``wait`` the task orders a stream or the host, and ``run`` does nothing. ``watch`` observes the op, or a
        thread that waits for another.
        """

    def join(self, pending: Collection[str]) -> None:
        """Order all later ops, on every stream, after all earlier ones except those that signal ``pending``."""

    def finish(self) -> None:
        """Wait until all ops are done, so that the host may read and overwrite any memory that they used."""

    def signal(self, event: str) -> None:
        """Mark an event as done that a step before the first one would have signalled."""

    def waiting_for(self, events: Collection[str]) -> Task:
        """Return a function that waits until these events, and all ops of ``compute`` so far, are done.

        Any thread may call it. It raises the failure of an op that prevents these ops from ever being done.
        """

    def entered(self) -> AbstractContextManager[None]:
        """Order the block after the caller's own earlier work, and before its later work."""

    def close(self) -> None:
        """Stop, and discard the tasks that are still queued."""


class OpEvent:
    """Whether one run of an op is done."""

    __slots__ = ("is_done",)

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = is_done


_DONE: Final = OpEvent(is_done=True)


class _StreamThread:
    """A stream's thread and queue."""

    def __init__(self, name: str, run: Callable[[Task], None]) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._run = run
        self.issued: list[OpEvent] = []
        # A daemon, because a thread that hangs in a collective must not keep a failed process alive.
        self._thread = threading.Thread(target=self._loop, name=f"zeroir-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Task | None) -> None:
        """Enqueue a task; None ends the thread."""
        self._tasks.put(task)

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current task."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                self._run(task)
                del task


_STOP_TIMEOUT_S: Final = 5.0


class ThreadStreams:
    """Streams of one process on the CPU.

    A failure in a stream is raised in the issuing thread, even while that waits.
    """

    def __init__(self, inline: Iterable[str] = (COMPUTE,)) -> None:
        self._inline = frozenset(inline)
        self._condition = threading.Condition()
        self._events: dict[str, OpEvent] = {}
        self._workers: dict[str, _StreamThread] = {}
        self._failure: BaseException | None = None

    def bind(self, op: Op, run: Task, watch: WatchOp | None = None) -> Task:
        if isinstance(op, Wait):
            return self._waiting(op, watch)
        if watch is not None:
            run = watch(run)
        match op:
            case Alloc() | Release() if op.stream in self._inline and op.event is None:
                # There is nothing to order, and the next compute op notices a failure elsewhere.
                return run
            case _ if op.stream in self._inline:
                return self._inline_task(op.event, run)
            case _:
                return lambda: self._enqueue(op.stream, op.event, run)

    def join(self, pending: Collection[str]) -> None:
        left_pending = {self._events[name] for name in pending if name in self._events}
        for worker in self._workers.values():
            # A queue runs in order, so the last op that must be done implies all before it.
            for event in reversed(worker.issued):
                if event not in left_pending:
                    self._await(event)
                    break
            worker.issued = [event for event in worker.issued if not event.is_done]
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        self.join(())

    def signal(self, event: str) -> None:
        self._events[event] = _DONE

    def waiting_for(self, events: Collection[str]) -> Task:
        """Return a function that waits for ``events``; the calling thread has already run the ops of ``compute``."""
        signalled = [self._events[name] for name in events]

        def wait() -> None:
            for event in signalled:
                self._await(event)

        return wait

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, stream: str, task: Task) -> None:
        """Enqueue a task that is not an op, after the ops of the stream."""
        self._worker(stream).put(task)

    def close(self) -> None:
        timeout_s = _STOP_TIMEOUT_S if self._failure is None else 0.0
        for worker in self._workers.values():
            worker.stop(timeout_s)
        self._workers.clear()

    def _worker(self, stream: str) -> _StreamThread:
        if stream not in self._workers:
            self._workers[stream] = _StreamThread(stream, self._guarded)
        return self._workers[stream]

    def _inline_task(self, name: str | None, run: Task) -> Task:
        def task() -> None:
            if self._failure is not None:
                raise self._failure
            run()
            if name is not None:
                self._events[name] = _DONE

        return task

    def _enqueue(self, stream: str, name: str | None, run: Task) -> None:
        event = OpEvent()
        if name is not None:
            self._events[name] = event
        worker = self._worker(stream)
        worker.issued.append(event)

        def task() -> None:
            run()
            with self._condition:
                event.is_done = True
                self._condition.notify_all()

        worker.put(task)

    def _waiting(self, op: Wait, watch: WatchOp | None) -> Task:
        def in_this_thread() -> None:
            self._await(self._events[op.waited])

        def on_the_stream() -> None:
            event = self._events[op.waited]
            wait = partial(self._await, event)
            if watch is not None:
                self._worker(op.on).put(watch(wait))
            elif not event.is_done:
                self._worker(op.on).put(wait)

        if op.on != HOST and op.on not in self._inline:
            return on_the_stream
        return in_this_thread if watch is None else watch(in_this_thread)

    def _guarded(self, task: Task) -> None:
        if self._failure is not None:
            return  # after a failure queued tasks must not touch memory
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the issuing thread
            with self._condition:
                if self._failure is None:
                    self._failure = error
                self._condition.notify_all()

    def _await(self, event: OpEvent) -> None:
        if not event.is_done:
            with self._condition:
                self._condition.wait_for(lambda: event.is_done or self._failure is not None)
        if self._failure is not None:
            raise self._failure
