"""Figures of the memory allocations that a test records."""

from __future__ import annotations

from collections.abc import Iterable

from zeroir.runtime.memory.allocations import AllocatorEvent


def left_bytes(events: Iterable[AllocatorEvent]) -> int:
    """The bytes that these events allocate and do not free."""
    return sum(event.size_bytes for event in events)
