"""The start and end of every op of a step, on each stream of each rank, for ``zeroir run --trace``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Protocol

from zeroir.ir.analysis.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import OpPosition
from zeroir.ir.spans import Span

Mark = Callable[[], int]
"""A marked time: it returns nanoseconds on this machine's monotonic clock, once the device has reached it."""


Task = Callable[[], None]

Watch = Callable[[OpPosition, Op, Task], Task]
"""A function that returns an observed version of a task, which runs the op at that position."""

WatchOp = Callable[[Task], Task]
"""A ``Watch`` of one op."""


class StreamClock(Protocol):
    """Marks times in the order of a stream."""

    def mark(self, stream: str) -> Mark:
        """Mark the time at which the stream has done all tasks submitted so far."""


class HostClock:
    """A clock for streams whose ops are done when their calls return."""

    def mark(self, _: str) -> Mark:
        """Mark the present time."""
        now = time.perf_counter_ns()
        return lambda: now


class SpanRecorder:
    """Observes ops, on any thread, and records the spans of time in which they ran."""

    def __init__(self) -> None:
        self._clock: StreamClock = HostClock()
        self._records: list[tuple[OpPosition, Mark, Mark]] = []

    def begin(self, clock: StreamClock) -> None:
        """Discard all spans, and use this clock from now on."""
        self._clock = clock
        self._records = []

    def watch(self, position: OpPosition, op: Op, run: Task) -> Task:
        stream = effects(op).stream

        def watched() -> None:
            # An op that ends after the next recording has started does not belong to it.
            records = self._records
            start = self._clock.mark(stream)
            run()
            records.append((position, start, self._clock.mark(stream)))

        return watched

    def spans(self) -> list[Span]:
        """Return the spans of all observed ops, in the order of their ends; every stream must have done them."""
        return [
            Span(position.section, position.index, start(), end())
            for position, start, end in self._records
        ]


def to_bytes(spans: Sequence[Span]) -> bytes:
    """Encode one rank's spans, and the clock readings that ``aligned`` needs."""
    wall_ns = time.time_ns() - time.perf_counter_ns()
    rows = [astuple(span) for span in spans]
    return json.dumps({"clock": _clock_name(), "wall_ns": wall_ns, "spans": rows}).encode()


def aligned(parts: Sequence[bytes]) -> list[list[Span]]:
    """Return every rank's spans, decoded from ``to_bytes``, on one clock that starts with the first of them.

    Ranks of one machine share its monotonic clock; several machines are aligned by their wall clocks.
    """
    decoded = [json.loads(part) for part in parts]
    wall_ns = {part["clock"]: part["wall_ns"] for part in reversed(decoded)}
    ranks = [
        [_moved(Span(*row), wall_ns[part["clock"]]) for row in part["spans"]] for part in decoded
    ]
    first = min((span.start_ns for spans in ranks for span in spans), default=0)
    return [[_moved(span, -first) for span in spans] for spans in ranks]


def _moved(span: Span, by_ns: int) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


def _clock_name() -> str:
    """Return a name that only processes with the same monotonic clock share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(time.time_ns())
