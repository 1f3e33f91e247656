"""The event simulation: a task starts when its predecessors have ended, and flows share their wires.

Time is in whole nanoseconds from the start of the step. A collective starts once a rank of every class in its group has
arrived at it, and a transfer of one rank immediately. After its latency its bytes flow, at the rate that the busiest of
its wires allows: where the demands on a wire exceed its bandwidth, all flows on it are slowed down by the same factor.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zeroir.cost.classes import RankClass
from zeroir.cost.tasks import Task, followers
from zeroir.cost.wires import Wire

_EPSILON_NS: Final = 1e-6
"""The remainder of a finished transfer that rounding may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The duration of a task alone on its wires; ``demands`` are fractions of their bandwidth during ``flow_ns``.

    ``axis`` is that of a collective; the task of another op concerns one rank.
    """

    fixed_ns: int
    flow_ns: int = 0
    demands: Mapping[Wire, float] = field(default_factory=dict)
    axis: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The times of the tasks of a class, by task: when each was ready, started its work, and ended.

    From ``ready_ns`` to ``begun_ns`` a task waits for other ranks. ``cause`` is the last predecessor to end: its class
    and its number.
    """

    ready_ns: list[int]
    begun_ns: list[int]
    end_ns: list[int]
    cause: list[tuple[int, int] | None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Flow:
    task: int
    members: tuple[int, ...]
    demands: Mapping[Wire, float]
    left_ns: float
    rate: float = 1.0


class _Wires:
    """The current transfers, and the time at which the first of them ends."""

    def __init__(self) -> None:
        self._flows: list[_Flow] = []
        self._now_ns = 0
        self.next_ns: int | None = None

    def add(self, flow: _Flow, now_ns: int) -> None:
        """Start a transfer."""
        self._advance(now_ns)
        self._flows.append(flow)
        self._share()

    def finished(self, now_ns: int) -> list[_Flow]:
        """Remove the finished transfers, and return them."""
        self._advance(now_ns)
        finished = [flow for flow in self._flows if flow.left_ns <= _EPSILON_NS]
        self._flows = [flow for flow in self._flows if flow.left_ns > _EPSILON_NS]
        self._share()
        return finished

    def _advance(self, now_ns: int) -> None:
        for flow in self._flows:
            flow.left_ns -= (now_ns - self._now_ns) * flow.rate
        self._now_ns = now_ns

    def _share(self) -> None:
        demand: dict[tuple[int, Wire], float] = {}
        for flow in self._flows:
            for member in flow.members:
                for wire, share in flow.demands.items():
                    demand[member, wire] = demand.get((member, wire), 0.0) + share
        ends: list[int] = []
        for flow in self._flows:
            busiest = max(
                (demand[member, wire] for member in flow.members for wire in flow.demands),
                default=1.0,
            )
            flow.rate = 1 / max(1.0, busiest)
            ends.append(self._now_ns + math.ceil((flow.left_ns - _EPSILON_NS) / flow.rate))
        self.next_ns = min(ends, default=None)


def run(
    tasks: Sequence[Task], classes: Sequence[RankClass], timings: Sequence[Sequence[Timing]]
) -> list[Timeline]:
    """Return the timeline of each class; ``timings`` are by class and task."""
    return _Simulator(tasks, classes, timings).run()


class _Simulator:
    def __init__(
        self,
        tasks: Sequence[Task],
        classes: Sequence[RankClass],
        timings: Sequence[Sequence[Timing]],
    ) -> None:
        self._tasks = tasks
        self._classes = classes
        self._timings = timings
        self._followers = followers(tasks)
        self._missing = [[len(task.after) for task in tasks] for _ in classes]
        self._timelines = [
            Timeline(
                ready_ns=[0] * len(tasks),
                begun_ns=[0] * len(tasks),
                end_ns=[0] * len(tasks),
                cause=[None] * len(tasks),
            )
            for _ in classes
        ]
        self._arrived: dict[tuple[tuple[int, ...], int], int] = {}
        self._wires = _Wires()
        # (time, a number that keeps the order of insertion, classes, task, transfer that starts then)
        self._queue: list[tuple[int, int, tuple[int, ...], int, _Flow | None]] = []
        self._pushed = 0

    def run(self) -> list[Timeline]:
        for rank_class in range(len(self._classes)):
            for number, task in enumerate(self._tasks):
                if not task.after:
                    self._begin(rank_class, number, 0)
        while self._queue or self._wires.next_ns is not None:
            flow_ns = self._wires.next_ns
            if flow_ns is not None and (not self._queue or flow_ns <= self._queue[0][0]):
                for flow in self._wires.finished(flow_ns):
                    self._end(flow.members, flow.task, flow_ns)
                continue
            now_ns, _, members, number, begun = heapq.heappop(self._queue)
            if begun is None:
                self._end(members, number, now_ns)
            else:
                self._wires.add(begun, now_ns)
        if any(count for missing in self._missing for count in missing):
            raise ValueError("a task waits for itself, or for one that never begins")
        return self._timelines

    def _begin(self, rank_class: int, number: int, now_ns: int) -> None:
        """Start a task of a class, all of whose predecessors have ended."""
        timing = self._timings[rank_class][number]
        timeline = self._timelines[rank_class]
        timeline.ready_ns[number] = timeline.begun_ns[number] = now_ns
        if timing.axis is None:
            self._push_timed(now_ns, timing, (rank_class,), number)
            return
        members = self._classes[rank_class].peers[timing.axis]
        arrived = self._arrived.get((members, number), 0) + 1
        self._arrived[members, number] = arrived
        if arrived < len(members):
            return
        # All others have waited for the last to arrive.
        for member in members:
            self._timelines[member].cause[number] = timeline.cause[number]
            self._timelines[member].begun_ns[number] = now_ns
        self._push_timed(now_ns, timing, members, number)

    def _push_timed(
        self, now_ns: int, timing: Timing, members: tuple[int, ...], number: int
    ) -> None:
        """Start a task of these classes: it ends after its latency, or its bytes flow from then on."""
        flow = _Flow(
            task=number, members=members, demands=timing.demands, left_ns=float(timing.flow_ns)
        )
        flows = flow if timing.flow_ns else None
        self._push(now_ns + timing.fixed_ns, members, number, flows)

    def _push(
        self, at_ns: int, members: tuple[int, ...], number: int, flow: _Flow | None = None
    ) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at_ns, self._pushed, members, number, flow))

    def _end(self, members: tuple[int, ...], number: int, now_ns: int) -> None:
        for rank_class in members:
            self._timelines[rank_class].end_ns[number] = now_ns
        for rank_class in members:
            missing = self._missing[rank_class]
            for follower in self._followers[number]:
                missing[follower] -= 1
                # Tasks end in temporal order, so the last one to end is the cause.
                if not missing[follower]:
                    self._timelines[rank_class].cause[follower] = (rank_class, number)
                    self._begin(rank_class, follower, now_ns)
