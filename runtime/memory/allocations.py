"""The allocations of a piece of code, as torch's CPU allocator reports them: every block, and the operators around it.

Only this module uses private names of torch's profiler; where a version of torch lacks them, the error names it. It
observes the host's memory; a device's allocator has its own counters.
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
_NOTICES: Final = (
    b"SyncActivityProfilerHandler",
    b"ActivityProfilerController.cpp",
    b"DeviceProperties.cpp",  # a CUDA build of torch on a machine without a GPU
    b"Memory block of unknown size",
)


class Range(NamedTuple):
    """A call of an operator, or a named period of time."""

    name: str
    start_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """A block of CPU memory that was allocated, or freed where ``size_bytes`` is negative.

    ``ranges`` are the operators and named ranges around it, the outermost first.
    """

    time_ns: int
    address: int
    size_bytes: int
    ranges: tuple[Range, ...]


def allocations(action: Callable[[], object]) -> list[AllocatorEvent]:
    """Return the events of an action, in temporal order; the action's result is kept until the end.

    Torch's profiler reports only the allocations of this thread.
    """
    is_collecting = gc.isenabled()
    gc.disable()  # Earlier garbage must not be freed during the action.
    try:
        with (
            _without_notices(),
            # Without `acc_events` torch 2.12 warns about later cycles, of which there are none.
            profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as profiler,
        ):
            kept = action()
    finally:
        if is_collecting:
            gc.enable()
    del kept
    events: list[AllocatorEvent] = []
    try:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        _collect(roots, (), events)
    except AttributeError as error:
        raise InternalError(
            f"the profiler of torch {torch.__version__} reports memory in another form: {error}"
        ) from error
    return sorted(events, key=lambda event: event.time_ns)


@contextmanager
def _without_notices() -> Iterator[None]:
    """Remove the profiler's notices about itself from standard error; it has no option for that."""
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
    """Return the most bytes that are allocated at once, counting only the blocks of these events."""
    live = most = 0
    for event in events:
        live += event.size_bytes
        most = max(most, live)
    return most


def by_range(
    events: Iterable[AllocatorEvent], names: Iterable[str]
) -> Mapping[str, Sequence[AllocatorEvent]]:
    """Return the events inside ranges of these names; under the empty name, the events outside all of them."""
    wanted = frozenset(names)
    by_name: dict[str, list[AllocatorEvent]] = {}
    for event in events:
        name = next((outer.name for outer in event.ranges if outer.name in wanted), "")
        by_name.setdefault(name, []).append(event)
    return by_name


def _collect(
    profiled: Sequence[torch._C._profiler._ProfilerEvent],
    ranges: tuple[Range, ...],
    events: list[AllocatorEvent],
) -> None:
    for event in profiled:
        if event.tag == torch._C._profiler._EventType.Allocation:
            block = event.extra_fields
            assert isinstance(block, torch._C._profiler._ExtraFields_Allocation)
            if block.device.type == "cpu":
                events.append(
                    AllocatorEvent(
                        time_ns=event.start_time_ns,
                        address=block.ptr,
                        size_bytes=block.alloc_size,
                        ranges=ranges,
                    )
                )
        else:
            own = Range(event.name, event.start_time_ns)
            _collect(event.children, (*ranges, own), events)
