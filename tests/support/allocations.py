"""What torch's own allocator says of a piece of code: every block that it hands out and takes back, and for whom.

The only place that looks into torch's profiler beyond its public names; where torch has moved something, the failure
names this torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A block handed out, or taken back where ``size_bytes`` is negative, on the CPU.

    ``ranges`` are the operators and named ranges around it, the outermost first.
    """

    time_ns: int
    address: int
    size_bytes: int
    ranges: tuple[str, ...]


def allocations(action: Callable[[], object]) -> list[Event]:
    """The events of an action in the order of time; what it returns is kept until its end.

    Only those of this thread: torch's profiler does not see what others allocate.
    """
    gc.collect()
    is_collecting = gc.isenabled()
    gc.disable()  # Garbage of others must not be taken back in the middle.
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = action()
    finally:
        if is_collecting:
            gc.enable()
    del kept
    found: list[Event] = []
    try:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        _collect(roots, (), found)
    except AttributeError as error:
        _fail(error)
    return sorted(found, key=lambda event: event.time_ns)


def peak_bytes(events: Iterable[Event]) -> int:
    """The most that is handed out at once, of what is handed out by these events."""
    live = most = 0
    for event in events:
        live += event.size_bytes
        most = max(most, live)
    return most


def left_bytes(events: Iterable[Event]) -> int:
    """What these events hand out and do not take back."""
    return sum(event.size_bytes for event in events)


def by_range(events: Iterable[Event], names: Iterable[str]) -> Mapping[str, Sequence[Event]]:
    """The events inside ranges of these names; under the empty name those inside none."""
    wanted = frozenset(names)
    found: dict[str, list[Event]] = {}
    for event in events:
        name = next((name for name in event.ranges if name in wanted), "")
        found.setdefault(name, []).append(event)
    return found


def _collect(
    events: Sequence[torch._C._profiler._ProfilerEvent], ranges: tuple[str, ...], found: list[Event]
) -> None:
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            block = event.extra_fields
            assert isinstance(block, torch._C._profiler._ExtraFields_Allocation)
            if block.device.type == "cpu":
                found.append(
                    Event(
                        time_ns=event.start_time_ns,
                        address=block.ptr,
                        size_bytes=block.alloc_size,
                        ranges=ranges,
                    )
                )
        else:
            _collect(event.children, (*ranges, event.name), found)


def _fail(error: Exception) -> None:
    pytest.fail(f"torch {torch.__version__} has moved what its profiler says of memory: {error}")
