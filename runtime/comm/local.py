"""A world of one rank: every collective is a copy, or nothing where source and destination are the same memory."""

from __future__ import annotations

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import CollectiveTensors, to_wire


class LocalComm:
    """Collectives of a world of one rank, enqueued on the current stream."""

    def all_gather(self, tensors: CollectiveTensors) -> None:
        _copy(tensors)

    def reduce_scatter(self, tensors: CollectiveTensors, _: Reduction) -> None:
        _copy(tensors)

    def all_reduce(self, tensors: CollectiveTensors, _: Reduction) -> None:
        _copy(tensors)

    def broadcast(self, tensors: CollectiveTensors, _: int) -> None:
        _copy(tensors)

    def close(self) -> None:
        """Do nothing: the backend holds no resources."""


def _copy(tensors: CollectiveTensors) -> None:
    """Copy every pair's source to its destination, rounded to the wire's dtype on the way."""
    for pair in tensors.pairs[0]:
        message = to_wire(pair.source, tensors.wire_dtype)
        is_in_place = (
            message.data_ptr() == pair.destination.data_ptr()
            and message.dtype == pair.destination.dtype
        )
        if not is_in_place:
            pair.destination.copy_(message)
