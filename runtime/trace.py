"""When every op of a step began and ended, on each stream of each rank: what ``zeroir run --trace`` writes down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import ParamSpec, Protocol

from zeroir.ir.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import OpPosition
from zeroir.ir.spans import Span

Mark = Callable[[], int]
"""A moment that was marked: its nanoseconds on this machine's monotonic clock, once the device has come to it."""


P = ParamSpec("P")


class Watch(Protocol):
    """Observes ops: it wraps the function that carries an op out, whatever arguments that takes."""

    def __call__(
        self, position: OpPosition, op: Op, run: Callable[P, None], /
    ) -> Callable[P, None]:
        """A function that does what ``run`` does, and each call of which is observed as the op at that position."""


class WatchOp(Protocol):
    """A ``Watch`` of one op."""

    def __call__(self, run: Callable[P, None], /) -> Callable[P, None]:
        """See ``Watch``."""


def watch_op(watch: Watch, position: OpPosition, op: Op) -> WatchOp:
    """The watch of one op."""

    def wrapped(run: Callable[P, None], /) -> Callable[P, None]:
        return watch(position, op, run)

    return wrapped


class StreamClock(Protocol):
    """Marks moments in the order of a stream."""

    def mark(self, stream: str) -> Mark:
        """The moment at which what the stream was given so far is done."""


class HostClock:
    """For streams whose ops are done when their calls return."""

    def mark(self, _: str) -> Mark:
        """Now."""
        now = time.perf_counter_ns()
        return lambda: now


class SpanRecorder:
    """Sees ops run, from any thread, and keeps when they began and ended."""

    def __init__(self) -> None:
        self._clock: StreamClock = HostClock()
        self._seen: list[tuple[OpPosition, Mark, Mark]] = []

    def begin(self, clock: StreamClock) -> None:
        """Forget what was seen, and go by this clock from now on."""
        self._clock = clock
        self._seen = []

    def watch(self, position: OpPosition, op: Op, run: Callable[P, None], /) -> Callable[P, None]:
        """See ``Watch``."""
        stream = effects(op).stream

        def watched(*args: P.args, **kwargs: P.kwargs) -> None:
            # What ends after the next recording began is none of it.
            seen = self._seen
            start = self._clock.mark(stream)
            run(*args, **kwargs)
            seen.append((position, start, self._clock.mark(stream)))

        return watched

    def spans(self) -> list[Span]:
        """What was seen, in the order in which it ended; every stream must have come so far."""
        return [
            Span(position.section, position.index, start(), end())
            for position, start, end in self._seen
        ]


def to_bytes(spans: Sequence[Span]) -> bytes:
    """One rank's spans, and what is needed to place them beside those of other ranks."""
    wall_ns = time.time_ns() - time.perf_counter_ns()
    rows = [astuple(span) for span in spans]
    return json.dumps({"clock": _clock_name(), "wall_ns": wall_ns, "spans": rows}).encode()


def aligned(parts: Sequence[bytes]) -> list[list[Span]]:
    """Every rank's spans on one clock that begins with the first of them, from ``to_bytes`` of every rank.

    Ranks of one machine share its clock; several machines are placed by their wall clocks, as well as those agree.
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
    """What only processes with the same monotonic clock have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(time.time_ns())
