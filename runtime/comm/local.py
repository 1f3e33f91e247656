"""One rank alone: every collective is a copy, and none where source and destination are the same memory."""

from __future__ import annotations

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import Launch, to_wire


class LocalComm:
    """Collectives of a world of one rank, enqueued on the current stream."""

    def all_gather(self, launch: Launch) -> None:
        """See ``Comm.all_gather``."""
        _copy(launch)

    def reduce_scatter(self, launch: Launch, _: Reduction) -> None:
        """See ``Comm.reduce_scatter``."""
        _copy(launch)

    def all_reduce(self, launch: Launch, _: Reduction) -> None:
        """See ``Comm.all_reduce``."""
        _copy(launch)

    def broadcast(self, launch: Launch, _: int) -> None:
        """See ``Comm.broadcast``."""
        _copy(launch)

    def close(self) -> None:
        """Nothing is held."""


def _copy(launch: Launch) -> None:
    """Every pair's source to its destination, rounded to the wire's dtype on the way."""
    for piece in launch.pieces[0]:
        message = to_wire(piece.source, launch.wire_dtype)
        is_there = (
            message.data_ptr() == piece.destination.data_ptr()
            and message.dtype == piece.destination.dtype
        )
        if not is_there:
            piece.destination.copy_(message)
