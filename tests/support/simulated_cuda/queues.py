"""Streams as queues whose tasks run as early or as late as a schedule says, in any order that waits allow.

Nothing runs when it is submitted. After each submission a few tasks may run, and whoever waits for a moment of a stream
runs tasks until it has come; a schedule draws which stream goes on, and starves one of them. So what a missing wait
would let happen on a device does happen here, for some seed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from zeroir.runtime.device.interface import DeviceEvent

Task = Callable[[], None]

PATIENCE_S: Final = 30.0
"""The seconds without any task that can run, after which the threads that wait are in a deadlock."""

_MANNERS: Final = 4
AT_ONCE: Final = -1
"""The seed of the schedule under which all work is done where it is submitted, as with ``CUDA_LAUNCH_BLOCKING``."""


class DeadlockError(RuntimeError):
    """No task can run, and somebody waits."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When tasks run, drawn from ``seed``, in one of four manners.

    * All but one stream run at once, and that one only where nothing else can.
    * One stream alone runs at once, and the others only where somebody waits.
    * Any stream may go on after each submission.
    * Nothing runs before somebody waits.
    """

    seed: int

    def streams_of(self, streams: Sequence[Queue], *, is_awaited: bool) -> Sequence[Queue]:
        """Return the streams from which the next task is drawn; those of an earlier kind go first."""
        if self.seed == AT_ONCE:
            return streams
        manner, index = self.seed % _MANNERS, self.seed // _MANNERS
        chosen = [stream for stream in streams if stream.index % 8 == index % 8]
        others = [stream for stream in streams if stream.index % 8 != index % 8]
        match manner:
            case 0:
                return others or (chosen if is_awaited else ())
            case 1:
                return chosen or (others if is_awaited else ())
            case 2:
                return streams
            case _:
                return streams if is_awaited else ()


@dataclass(eq=False, repr=False)
class Moment:
    """The end of what a stream had to do when it was recorded."""

    queue: Queue
    graph: Recording | None = None
    """The capture in which it was recorded."""
    node: Node | None = None
    """The last captured task of its stream."""
    is_done: bool = False

    def synchronize(self) -> None:
        self.queue.world.refuse_in_capture(self.queue)
        self.queue.world.until(lambda: self.is_done, f"an event of stream {self.queue.index}")


@dataclass(eq=False)
class Node:
    """A captured task, and those that it comes after."""

    task: Task
    after: tuple[Node, ...]


@dataclass(eq=False)
class Recording:
    """A capture: its tasks in the order of submission, and how many streams have joined."""

    nodes: list[Node] = field(default_factory=list)
    joined: set[Queue] = field(default_factory=set)
    is_spoiled: bool = False


class Item:
    """What stands in a queue."""

    def is_ready(self) -> bool:
        """Whether it can run now."""
        return True

    def run(self) -> None:
        """Run it, and remove it from its queue."""
        raise NotImplementedError


@dataclass(eq=False)
class _Work(Item):
    queue: Queue
    task: Task

    def run(self) -> None:
        self.queue.items.popleft()
        self.task()


@dataclass(eq=False)
class _Wait(Item):
    queue: Queue
    moment: Moment

    def is_ready(self) -> bool:
        return self.moment.is_done

    def run(self) -> None:
        self.queue.items.popleft()


@dataclass(eq=False)
class Queue:
    """A stream of a device."""

    world: World
    device: int
    index: int
    items: deque[Item] = field(default_factory=deque)
    capture: Recording | None = None
    last: tuple[Node, ...] = ()
    """In a capture, the nodes that the stream's next one comes after."""

    def submit(self, task: Task) -> None:
        """Let the stream do something when its turn comes."""
        with self.world.changing:
            if self.capture is not None:
                node = Node(task, self.last)
                self.capture.nodes.append(node)
                self.last = (node,)
                return
            self.items.append(_Work(self, task))
            self.world.wander()

    def place(self, item: Item) -> None:
        """Let an item stand at the end of the queue."""
        with self.world.changing:
            self.items.append(item)
            self.world.wander()

    def record_event(self) -> Moment:
        with self.world.changing:
            if self.capture is not None:
                # A node of its own, so that an event is one node, whatever the stream has waited for.
                self.submit(_nothing)
                return Moment(self, graph=self.capture, node=self.last[0])
            moment = Moment(self)

            def arrive() -> None:
                moment.is_done = True

            self.submit(arrive)
            return moment

    def wait_event(self, moment: DeviceEvent) -> None:
        assert isinstance(moment, Moment)
        with self.world.changing:
            if moment.graph is not None and (self.capture in (None, moment.graph)):
                assert moment.node is not None
                if self.capture is None:
                    if moment.graph not in self.world.captures:
                        raise RuntimeError("an event of a capture that has ended is waited for")
                    self.capture, self.last = moment.graph, ()
                    moment.graph.joined.add(self)
                self.last = (*self.last, moment.node)
                return
            if self.capture is not None:
                self.capture.is_spoiled = True
                raise RuntimeError("dependency created on uncaptured work in another stream")
            self.items.append(_Wait(self, moment))
            self.world.wander()

    def synchronize(self) -> None:
        self.world.refuse_in_capture(self)
        self.world.until(lambda: not self.items, f"stream {self.index} of device {self.device}")

    def query(self) -> bool:
        """Return whether all is done that was submitted."""
        with self.world.changing:
            return not self.items


class World:
    """All streams of all devices. One thread at a time changes or runs them."""

    def __init__(self, schedule: Schedule) -> None:
        self.changing = threading.Condition(threading.RLock())
        self.queues: list[Queue] = []
        self.captures: set[Recording] = set()
        self.schedule = schedule
        self.random = Random(schedule.seed)
        self.failure: BaseException | None = None
        self._is_running = False
        self.ran = 0

    def new_queue(self, device: int) -> Queue:
        with self.changing:
            index = sum(queue.device == device for queue in self.queues)
            self.queues.append(Queue(self, device, index))
            return self.queues[-1]

    def refuse_in_capture(self, *queues: Queue) -> None:
        """Raise RuntimeError where the host would wait for a stream that is being captured."""
        for queue in queues:
            if queue.capture is not None:
                queue.capture.is_spoiled = True
                raise RuntimeError("operation not permitted when stream is capturing")

    def wander(self) -> None:
        """Let as many tasks run after a submission as the schedule draws."""
        if self._is_running:
            return
        is_eager = self.schedule.seed == AT_ONCE or self.schedule.seed % _MANNERS < 2
        most = 1_000_000 if is_eager else self.random.randrange(4)
        for _ in range(most):
            if not self._step(is_awaited=False):
                return

    def until(self, is_reached: Callable[[], bool], what: str) -> None:
        """Run tasks until something holds; other threads may submit some meanwhile.

        Raises:
            DeadlockError: where for a long time no task can run.
        """
        with self.changing:
            last, ran = time.monotonic(), self.ran
            while not is_reached():
                self._raise_failure()
                if self._step(is_awaited=True):
                    continue
                if self.ran != ran:
                    last, ran = time.monotonic(), self.ran
                if time.monotonic() - last > PATIENCE_S:
                    waiting = [
                        f"{q.device}.{q.index}: {q.items[0]}" for q in self.queues if q.items
                    ]
                    raise DeadlockError(f"{what} does not end: {'; '.join(waiting)}")
                self.changing.wait(0.02)
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"the device failed: {self.failure}") from self.failure

    def _step(self, *, is_awaited: bool) -> bool:
        """Run one task that is ready, if the schedule lets any of them run."""
        ready = [queue for queue in self.queues if queue.items and queue.items[0].is_ready()]
        drawn = self.schedule.streams_of(ready, is_awaited=is_awaited)
        if not drawn or self.failure is not None:
            return False
        queue = self.random.choice(drawn)
        self._is_running = True
        try:
            queue.items[0].run()
        except BaseException as error:  # noqa: BLE001 - a device reports it where the host waits next
            self.failure = error
        finally:
            self._is_running = False
        self.ran += 1
        self.changing.notify_all()
        return True

    def begin(self, queue: Queue) -> Recording:
        """Return the recording of what a stream is given from now on."""
        recording = Recording(joined={queue})
        queue.capture, queue.last = recording, ()
        self.captures.add(recording)
        return recording

    def end(self, origin: Queue, recording: Recording) -> None:
        """End a capture.

        Raises:
            RuntimeError: where work of a stream that joined is not waited for, or the capture was spoiled.
        """
        ends = [node for queue in recording.joined for node in queue.last]
        reached = _before(origin.last)
        for queue in recording.joined:
            queue.capture, queue.last = None, ()
        self.captures.discard(recording)
        if recording.is_spoiled:
            raise RuntimeError("operation failed due to a previous error during capture")
        if any(node not in reached for node in ends):
            raise RuntimeError("capturing stream has unjoined work")

    def replay(self, recording: Recording) -> None:
        """Run the tasks of a capture in an order that its dependencies allow, drawn at random."""
        left = list(recording.nodes)
        done: set[Node] = set()
        while left:
            ready = [node for node in left if all(before in done for before in node.after)]
            node = self.random.choice(ready)
            node.task()
            done.add(node)
            left.remove(node)


def _before(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.after
    return found


def _nothing() -> None:
    pass
