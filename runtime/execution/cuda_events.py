"""Events of a device that threads record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zeroir.runtime.device.interface import DeviceEvent


@dataclass(slots=True, eq=False)
class LateEvent:
    """An event that another thread records, once it has issued the op that signals it."""

    recorded: DeviceEvent | None = None


Event = DeviceEvent | LateEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSignal:
    """An op that signals an event which can be pending between sections; ``before`` precedes it on its stream."""

    event: str
    before: Event


def under_way(last: Sequence[PendingSignal], pending: Collection[str]) -> list[PendingSignal]:
    """Return the last ops of a stream that signal ``pending``; where two ops signal one name, the later one counts."""
    left = set(pending)
    first = len(last)
    while first > 0 and last[first - 1].event in left:
        first -= 1
        left.remove(last[first].event)
    return list(last[first:])


def recorded(event: Event | None) -> DeviceEvent | None:
    """Return the device's event; None where there is none or it is not recorded yet."""
    return event.recorded if isinstance(event, LateEvent) else event


def synchronize(event: Event) -> None:
    """Wait for the device; a late event must already be recorded."""
    arrived = recorded(event)
    assert arrived is not None
    arrived.synchronize()
