"""The event simulation: tasks begin when what they come after has ended, and collectives share their wires.

Time is in whole nanoseconds from the begin of the step. A collective begins once a rank of every class in its group
has come to it; after its latency its bytes flow, at the rate that the busiest of its wires leaves it: where more is
asked of a wire than it has, everything on it slows down alike. So a wire never carries more than it can.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zeroir.cost.classes import RankClass
from zeroir.cost.collectives import Wire
from zeroir.cost.tasks import Task, followers

_EPSILON_NS: Final = 1e-6
"""What rounding may leave of a transfer that is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a task takes by itself; ``demands`` are shares of the wires that its ``flow_ns`` take."""

    fixed_ns: int
    flow_ns: int = 0
    demands: Mapping[Wire, float] = field(default_factory=dict)
    axis: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When the tasks of a class happen, by task: when each was ready, began its own work, and ended.

    Between ``begun_ns`` and ``end_ns`` it works; before, it waits for other ranks. ``cause`` is the class and the task
    that it was last to wait for.
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
    """What flows at the moment, and when the first of it is over."""

    def __init__(self) -> None:
        self._flows: list[_Flow] = []
        self._now_ns = 0
        self.next_ns: int | None = None

    def add(self, flow: _Flow, now_ns: int) -> None:
        """Another flow begins."""
        self._advance(now_ns)
        self._flows.append(flow)
        self._share()

    def finished(self, now_ns: int) -> list[_Flow]:
        """Take out the flows that are over."""
        self._advance(now_ns)
        over = [flow for flow in self._flows if flow.left_ns <= _EPSILON_NS]
        self._flows = [flow for flow in self._flows if flow.left_ns > _EPSILON_NS]
        self._share()
        return over

    def _advance(self, now_ns: int) -> None:
        for flow in self._flows:
            flow.left_ns -= (now_ns - self._now_ns) * flow.rate
        self._now_ns = now_ns

    def _share(self) -> None:
        asked: dict[tuple[int, Wire], float] = {}
        for flow in self._flows:
            for member in flow.members:
                for wire, demand in flow.demands.items():
                    asked[member, wire] = asked.get((member, wire), 0.0) + demand
        ends: list[int] = []
        for flow in self._flows:
            busiest = max(
                (asked[member, wire] for member in flow.members for wire in flow.demands),
                default=1.0,
            )
            flow.rate = 1 / max(1.0, busiest)
            ends.append(self._now_ns + math.ceil((flow.left_ns - _EPSILON_NS) / flow.rate))
        self.next_ns = min(ends, default=None)


def run(
    tasks: Sequence[Task], classes: Sequence[RankClass], timings: Sequence[Sequence[Timing]]
) -> list[Timeline]:
    """When every task happens, by class; ``timings`` are by class and task."""
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
        self._lines = [
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
        # (when, a number that keeps the order, the classes, the task, what flows then)
        self._queue: list[tuple[int, int, tuple[int, ...], int, _Flow | None]] = []
        self._pushed = 0

    def run(self) -> list[Timeline]:
        for one in range(len(self._classes)):
            for number, task in enumerate(self._tasks):
                if not task.after:
                    self._begin(one, number, 0)
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
            raise ValueError("a task comes after itself, or after one that never comes")
        return self._lines

    def _begin(self, one: int, number: int, now_ns: int) -> None:
        """All that a task of a class comes after has ended."""
        timing, line = self._timings[one][number], self._lines[one]
        line.ready_ns[number] = line.begun_ns[number] = now_ns
        if timing.axis is None:
            self._push(now_ns + timing.fixed_ns, (one,), number)
            return
        members = self._classes[one].peers[timing.axis]
        arrived = self._arrived.get((members, number), 0) + 1
        self._arrived[members, number] = arrived
        if arrived < len(members):
            return
        # The last to come is what all the others waited for.
        for member in members:
            self._lines[member].cause[number] = line.cause[number]
            self._lines[member].begun_ns[number] = now_ns
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
        for one in members:
            self._lines[one].end_ns[number] = now_ns
        for one in members:
            missing = self._missing[one]
            for follower in self._followers[number]:
                missing[follower] -= 1
                # Ends come in the order of time, so the last of them is what the follower waited for.
                if not missing[follower]:
                    self._lines[one].cause[follower] = (one, number)
                    self._begin(one, follower, now_ns)
