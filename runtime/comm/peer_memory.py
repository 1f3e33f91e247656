"""Collectives between ranks of one host that read each other's memory: one copy, no sockets, sums in rank order.

In every collective each rank sends the others the addresses of its tensors, and reads the elements that it needs
directly into their destinations. It returns when all ranks have read, because then its sources may be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import SMALL_NUMEL, CollectiveTensors, combine, to_wire
from zeroir.runtime.comm.peer_group import SCRATCH_NUMEL, PeerGroup, SharedTensors, in_short


class PeerMemoryComm:
    """Collectives of one rank that reads its peers' memory; ``peer_groups`` has the group of each communicator."""

    def __init__(self, peer_groups: Mapping[str, PeerGroup]) -> None:
        self._groups = peer_groups

    def all_gather(self, tensors: CollectiveTensors) -> None:
        collective = self._open("all_gather", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            slots = pair.destination.view(collective.size, -1)
            for coordinate in collective.coordinates():
                collective.fetch(coordinate, index, slots[coordinate])
        collective.agree()

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        collective = self._open(f"reduce_scatter by {reduction}", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            start = collective.coordinate * pair.destination.numel()
            collective.combine(index, start, reduction, pair.destination)
        collective.agree()

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """Reduce with the ``reduce_scatter`` above, and gather the slices."""
        pairs = tensors.pairs[0]
        collective = self._open(f"all_reduce by {reduction}", tensors)
        if sum(pair.source.numel() for pair in pairs) <= SMALL_NUMEL:
            totals = [torch.empty_like(pair.destination) for pair in pairs]
            for index, total in enumerate(totals):
                collective.combine(index, 0, reduction, total)
            collective.agree()
            for pair, total in zip(pairs, totals, strict=True):
                pair.destination.copy_(total)
            return
        slices = [pair.destination.tensor_split(collective.size) for pair in pairs]
        for index, parts in enumerate(slices):
            own = parts[collective.coordinate]
            collective.combine(index, _start(parts, collective.coordinate), reduction, own)
        collective.agree()
        for index, parts in enumerate(slices):
            for coordinate in collective.coordinates():
                if coordinate != collective.coordinate:
                    collective.fetch_result(
                        coordinate, index, _start(parts, coordinate), parts[coordinate]
                    )
        collective.agree()

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        collective = self._open(f"broadcast from {root}", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            collective.fetch(root, index, pair.destination)
        collective.agree()

    def close(self) -> None:
        """Close the channels to the peers."""
        for peer_group in self._groups.values():
            peer_group.close()

    def _open(self, kind: str, tensors: CollectiveTensors) -> _OpenCollective:
        return _OpenCollective(self._groups[tensors.comm], kind, tensors)


class _OpenCollective:
    """One collective of one communicator, whose ranks read each other's sources and destinations.

    Raises:
        DifferentCollectivesError: where another rank starts another collective, or one of other sizes or dtypes.
    """

    def __init__(self, peer_group: PeerGroup, kind: str, tensors: CollectiveTensors) -> None:
        self.size = peer_group.size
        self.coordinate = peer_group.coordinate
        self._group = peer_group
        self._wire_dtype = tensors.wire_dtype
        pairs = tensors.pairs[0]
        self._sources = [pair.source for pair in pairs]
        self._shared = SharedTensors(
            peer_group,
            f"{kind} of {in_short(self._sources)}",
            [*self._sources, *(pair.destination for pair in pairs)],
        )

    def coordinates(self) -> Iterator[int]:
        """Return all coordinates, starting with this rank's, so that not all ranks read from the same one at a time."""
        return ((self.coordinate + step) % self.size for step in range(self.size))

    def fetch(self, coordinate: int, index: int, destination: Tensor) -> None:
        """Copy the whole ``index``-th source of a coordinate, rounded to the wire's dtype on the way."""
        source = self._sources[index]
        is_plain = destination.dtype == source.dtype and self._wire_dtype in (None, source.dtype)
        if is_plain and coordinate != self.coordinate:
            self._shared.read(coordinate, index, 0, destination)
        elif not is_plain or destination.data_ptr() != source.data_ptr():
            for start, chunk in _chunks(destination):
                chunk.copy_(self._part(coordinate, index, start, chunk.numel()))

    def fetch_result(self, coordinate: int, index: int, start: int, destination: Tensor) -> None:
        """Copy from the ``index``-th destination of another coordinate, from the ``start``-th element on."""
        self._shared.read(coordinate, len(self._sources) + index, start, destination)

    def combine(self, index: int, start: int, reduction: Reduction, destination: Tensor) -> None:
        """Reduce all ranks' ``index``-th sources, from the ``start``-th element on, in rank order."""
        for offset, chunk in _chunks(destination):
            parts = (
                self._part(coordinate, index, start + offset, chunk.numel())
                for coordinate in range(self.size)
            )
            combine(parts, reduction, chunk)

    def agree(self) -> None:
        """Wait until every rank has completed this step."""
        self._shared.agree()

    def _part(self, coordinate: int, index: int, start: int, numel: int) -> Tensor:
        """Return elements of a source in the wire's dtype: this rank's own, or a copy in scratch memory."""
        source = self._sources[index]
        if coordinate == self.coordinate:
            return to_wire(source[start : start + numel], self._wire_dtype)
        part = self._group.scratch(coordinate, source.dtype, numel)
        self._shared.read(coordinate, index, start, part)
        return to_wire(part, self._wire_dtype)


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a flat tensor in chunks, with their offsets."""
    for start in range(0, tensor.numel(), SCRATCH_NUMEL):
        yield start, tensor[start : start + SCRATCH_NUMEL]


def _start(parts: Sequence[Tensor], coordinate: int) -> int:
    """Return the index of the first element of a coordinate's slice."""
    return sum(part.numel() for part in parts[:coordinate])
