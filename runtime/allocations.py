"""What torch's own allocator says of a piece of code: every block that it hands out and takes back, and for whom.

The only place that looks into torch's profiler beyond its public names; where torch has moved something, the failure
names this torch. It sees the host's memory; a device's allocator has counters of its own.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from zeroir.errors import InternalError

_STDERR: Final = 2
_NOTICES: Final = (b"SyncActivityProfilerHandler", b"Memory block of unknown size")


class Range(NamedTuple):
    """A call of an operator, or a stretch of time with a name."""

    name: str
    start_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """A block handed out, or taken back where ``size_bytes`` is negative, on the CPU.

    ``ranges`` are the operators and named ranges around it, the outermost first.
    """

    time_ns: int
    address: int
    size_bytes: int
    ranges: tuple[Range, ...]


def allocations(action: Callable[[], object]) -> list[AllocatorEvent]:
    """The events of an action in the order of time; what it returns is kept until its end.

    Only those of this thread: torch's profiler does not see what others allocate.
    """
    gc.collect()
    is_collecting = gc.isenabled()
    gc.disable()  # Garbage of others must not be taken back in the middle.
    try:
        with (
            _without_notices(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            kept = action()
    finally:
        if is_collecting:
            gc.enable()
    del kept
    found: list[AllocatorEvent] = []
    try:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        _collect(roots, (), found)
    except AttributeError as error:
        raise InternalError(
            f"torch {torch.__version__} has moved what its profiler says of memory: {error}"
        ) from error
    return sorted(found, key=lambda event: event.time_ns)


@contextmanager
def _without_notices() -> Iterator[None]:
    """Keep the notices of the profiler about itself off standard error, which has no switch for them."""
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        own = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, _STDERR)
            os.close(own)
            held.seek(0)
            for line in held:
                if not any(notice in line for notice in _NOTICES):
                    os.write(_STDERR, line)


def peak_bytes(events: Iterable[AllocatorEvent]) -> int:
    """The most that is handed out at once, of what is handed out by these events."""
    live = most = 0
    for event in events:
        live += event.size_bytes
        most = max(most, live)
    return most


def left_bytes(events: Iterable[AllocatorEvent]) -> int:
    """What these events hand out and do not take back."""
    return sum(event.size_bytes for event in events)


def by_range(
    events: Iterable[AllocatorEvent], names: Iterable[str]
) -> Mapping[str, Sequence[AllocatorEvent]]:
    """The events inside ranges of these names; under the empty name those inside none."""
    wanted = frozenset(names)
    found: dict[str, list[AllocatorEvent]] = {}
    for event in events:
        name = next((one.name for one in event.ranges if one.name in wanted), "")
        found.setdefault(name, []).append(event)
    return found


def _collect(
    events: Sequence[torch._C._profiler._ProfilerEvent],
    ranges: tuple[Range, ...],
    found: list[AllocatorEvent],
) -> None:
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            block = event.extra_fields
            assert isinstance(block, torch._C._profiler._ExtraFields_Allocation)
            if block.device.type == "cpu":
                found.append(
                    AllocatorEvent(
                        time_ns=event.start_time_ns,
                        address=block.ptr,
                        size_bytes=block.alloc_size,
                        ranges=ranges,
                    )
                )
        else:
            own = Range(event.name, event.start_time_ns)
            _collect(event.children, (*ranges, own), found)
