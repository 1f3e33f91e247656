"""The streams of an update on the host: its own, and those of the copies down to it and up from it.

Copies of an update wait for the host, so they have streams apart from ``copy_in`` and ``copy_out``: on these, what a
computation needs soon would stand behind a copy that waits for the host's update.
"""

from __future__ import annotations

from typing import Final

from zeroir.ir.mesh import OPTIMIZER, Executor, Stream
from zeroir.passes.common import rewrite

UPDATE_OUT: Final = "update_out"
"""Copies to the host that update there what they bring, or wait for an update."""

UPDATE_IN: Final = "update_in"
"""Copies to the device of what the host computed."""

BESIDE: Final = Stream(name="update", executor=Executor.DEVICE)
"""Ops of an update on the device that run beside the backward. They wait for no update of the host."""

_COPIES: Final = tuple(
    Stream(name=name, executor=Executor.DEVICE) for name in (UPDATE_IN, UPDATE_OUT)
)


def with_update_streams(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """The streams, with those of an update on the host that are not among them."""
    declared = {stream.name for stream in streams}
    copies = (stream for stream in _COPIES if stream.name not in declared)
    return (*rewrite.with_streams(streams, {OPTIMIZER}), *copies)
