"""A judge of order: what every stream comes after at a point of a section, by vector clocks over ops and waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zeroir.ir import ops
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Op

Clock = Mapping[str, int]
"""For each stream, how many of its ops are surely finished."""


class Clocks:
    """What every stream comes after, from the ops that were issued."""

    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = {}
        self._at: dict[str, tuple[str, dict[str, int]]] = {}

    def issue(self, op: Op) -> None:
        """An op, or a wait, was issued."""
        match op:
            case ops.Wait():
                _, clock = self._at.get(op.waited, ("", {}))
                if op.on == HOST:
                    for own in (self._of(HOST), *self._clocks.values()):
                        _join(own, clock)
                else:
                    _join(self._of(op.on), clock)
            case _:
                clock = self._of(op.stream)
                clock[op.stream] = clock.get(op.stream, 0) + 1
                if op.event is not None:
                    self._at[op.event] = (op.stream, dict(clock))

    def join(self, pending: Collection[str]) -> None:
        """A boundary was issued: what is later comes after what is before, but for the ops of ``pending`` events."""
        counts = {stream: clock.get(stream, 0) for stream, clock in self._clocks.items()}
        for event in pending:
            if event in self._at:
                stream, clock = self._at[event]
                counts[stream] = min(counts[stream], clock[stream] - 1)
        # What comes after an op also comes after all that the op has waited for, a pending op too.
        for stream, clock in self._clocks.items():
            _join(counts, {other: count for other, count in clock.items() if other != stream})
        for own in (self._of(HOST), *self._clocks.values()):
            _join(own, counts)

    def clock(self, stream: str) -> Clock:
        """What the next op of the stream comes after."""
        return dict(self._of(stream))

    def is_after(self, stream: str, clock: Clock) -> bool:
        """Whether the next op of the stream comes after all of that."""
        own = self._of(stream)
        return all(own.get(other, 0) >= count for other, count in clock.items())

    def _of(self, stream: str) -> dict[str, int]:
        # A stream that first appears after a wait of the host comes after what the host waited for.
        if stream not in self._clocks:
            self._clocks[stream] = dict(self._clocks.get(HOST, {}))
        return self._clocks[stream]


def _join(clock: dict[str, int], other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
