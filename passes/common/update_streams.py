"""The streams of an update on the host: its own, and those of the copies down to it and up from it.

Copies of an update wait for the host, so they have other streams than ``copy_in`` and ``copy_out``: on these, a copy
that a computation needs soon would wait behind one that waits for the host's update.
"""

from __future__ import annotations

from typing import Final

from zeroir.ir.mesh import OPTIMIZER, Executor, Stream
from zeroir.passes.common import rewrite

UPDATE_OUT: Final = "update_out"
"""Copies to the host of data that an update changes there, or that wait for an update."""

UPDATE_IN: Final = "update_in"
"""Copies to the device of the host's results."""

BESIDE: Final = Stream(name="update", executor=Executor.DEVICE)
"""Ops of an update on the device that overlap with the backward. They do not wait for an update of the host."""

_COPIES: Final = tuple(
    Stream(name=name, executor=Executor.DEVICE) for name in (UPDATE_IN, UPDATE_OUT)
)


def with_update_streams(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """Return the streams, and those of an update on the host that are not among them."""
    declared = {stream.name for stream in streams}
    copies = (stream for stream in _COPIES if stream.name not in declared)
    return (*rewrite.with_streams(streams, {OPTIMIZER}), *copies)
