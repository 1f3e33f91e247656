"""Collectives between ranks of one host that read each other's memory: one copy, no sockets, sums in rank order.

In every collective each rank tells the others the addresses of its tensors, and reads the elements that it needs
straight to their destinations. It returns when all ranks have read, because its sources may be overwritten then.
Waiting ranks sleep in the kernel, and a rank that ends wakes those that wait for it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.ops import Reduction
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import SMALL_NUMEL, CollectiveTensors, combine, to_wire
from zeroir.runtime.comm.peers import Exchange, Peer, connect_peers

_CHUNK_NUMEL: Final = 1 << 18
"""Elements that are read before they are added: few system calls, and still in the cache."""

_ADDRESS: Final = struct.Struct("=Q")
_LISTED: Final = 8
"""The most tensors that the title of a collective lists one by one."""

_CHUNKS: Final = 3
"""The most parts that ``combine`` holds at once."""


@dataclass(slots=True, kw_only=True)
class PeerGroup:
    """The ranks of one communicator: this rank's coordinate, and the peers by theirs.

    ``table`` (u64) holds the addresses of this rank's tensors in the current collective.
    """

    name: str
    coordinate: int
    size: int
    peers: Mapping[int, Peer]
    collectives_begun: int = 0
    table: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint64))
    _scratch: Tensor | None = field(default=None, init=False)

    def scratch(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for at most ``_CHUNK_NUMEL`` elements; ``_CHUNKS`` turns in a row get different memory."""
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNKS, 8 * _CHUNK_NUMEL, dtype=torch.uint8)
        return self._scratch[turn % _CHUNKS, : numel * dtype.itemsize].view(dtype)


def open_peer_memory(
    program: Program, rank: int, exchange: Exchange, timeout: timedelta
) -> PeerMemoryComm | None:
    """Collectives over every communicator of a program; None, on every rank, where one cannot read another's memory.

    All ranks call this together. ``timeout`` bounds the wait for a rank in a collective.
    """
    groups = [
        next(group for group in program.mesh.groups(comm.axis) if rank in group)
        for comm in program.comms
    ]
    peer_ranks = [[peer for peer in group if peer != rank] for group in groups]
    connected = connect_peers(rank, peer_ranks, exchange, timeout)
    if connected is None:
        return None
    return PeerMemoryComm(
        {
            comm.name: PeerGroup(
                name=comm.name,
                coordinate=group.index(rank),
                size=len(group),
                peers={group.index(peer_rank): peer for peer_rank, peer in peers.items()},
            )
            for comm, group, peers in zip(program.comms, groups, connected, strict=True)
        }
    )


class PeerMemoryComm:
    """Collectives of one rank that reads its peers' memory; ``peer_groups`` holds those of each communicator."""

    def __init__(self, peer_groups: Mapping[str, PeerGroup]) -> None:
        self._groups = peer_groups

    def all_gather(self, tensors: CollectiveTensors) -> None:
        """See ``Comm.all_gather``."""
        collective = self._open("all_gather", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            slots = pair.destination.view(collective.size, -1)
            for coordinate in collective.coordinates():
                collective.fetch(coordinate, index, slots[coordinate])
        collective.agree()

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``."""
        collective = self._open(f"reduce_scatter by {reduction}", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            start = collective.coordinate * pair.destination.numel()
            collective.combine(index, start, reduction, pair.destination)
        collective.agree()

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``: the reduce_scatter above and an all_gather."""
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
        """See ``Comm.broadcast``."""
        collective = self._open(f"broadcast from {root}", tensors)
        for index, pair in enumerate(tensors.pairs[0]):
            collective.fetch(root, index, pair.destination)
        collective.agree()

    def close(self) -> None:
        """Close the channels to the peers."""
        for peer_group in self._groups.values():
            for peer in peer_group.peers.values():
                peer.close()

    def _open(self, kind: str, tensors: CollectiveTensors) -> _OpenCollective:
        return _OpenCollective(self._groups[tensors.comm], kind, tensors)


class _OpenCollective:
    """One collective of one communicator: the addresses of all ranks' tensors, and the steps that ranks have completed.

    Raises:
        RuntimeError: where another rank begins a different collective, or one of other sizes or dtypes.
    """

    def __init__(self, peer_group: PeerGroup, kind: str, tensors: CollectiveTensors) -> None:
        peer_group.collectives_begun += 1
        self.size = peer_group.size
        self.coordinate = peer_group.coordinate
        self._group = peer_group
        self._wire_dtype = tensors.wire_dtype
        pairs = tensors.pairs[0]
        self._sources = [pair.source for pair in pairs]
        self._destinations = [pair.destination for pair in pairs]
        self._name = f"#{peer_group.collectives_begun} {kind} of {_in_short(self._sources)}"
        self._step = 0
        self._addresses: dict[int, Sequence[int]] = {}
        # Of any length, so the peers read it from this memory; it stays until all have begun the next collective.
        peer_group.table = torch.tensor(
            [tensor.data_ptr() for tensor in (*self._sources, *self._destinations)],
            dtype=torch.uint64,
        )
        self._send(_ADDRESS.pack(peer_group.table.data_ptr()))

    def coordinates(self) -> Iterator[int]:
        """All coordinates from this rank's on, so that the ranks do not all read from the same one at a time."""
        return ((self.coordinate + step) % self.size for step in range(self.size))

    def fetch(self, coordinate: int, index: int, destination: Tensor) -> None:
        """Copy the whole ``index``-th source of a coordinate, rounded to the wire's dtype on the way."""
        source = self._sources[index]
        is_plain = destination.dtype == source.dtype and self._wire_dtype in (None, source.dtype)
        if is_plain and coordinate != self.coordinate:
            self._read(coordinate, index, 0, destination)
        elif not is_plain or destination.data_ptr() != source.data_ptr():
            for start, chunk in _chunks(destination):
                chunk.copy_(self._part(coordinate, index, start, chunk.numel()))

    def fetch_result(self, coordinate: int, index: int, start: int, destination: Tensor) -> None:
        """Copy from the ``index``-th destination of another coordinate, from the ``start``-th element on."""
        self._read(coordinate, len(self._sources) + index, start, destination)

    def combine(self, index: int, start: int, reduction: Reduction, destination: Tensor) -> None:
        """Combine all ranks' ``index``-th sources from the ``start``-th element on, in rank order."""
        for offset, chunk in _chunks(destination):
            parts = (
                self._part(coordinate, index, start + offset, chunk.numel())
                for coordinate in range(self.size)
            )
            combine(parts, reduction, chunk)

    def agree(self) -> None:
        """Return when every rank has completed this step."""
        for coordinate in self._group.peers:
            # A rank that has read nothing from this peer has not received its table yet.
            self._address(coordinate, 0)
        self._step += 1
        self._send(b"")
        for coordinate in self._group.peers:
            self._receive(coordinate, 0)

    def _part(self, coordinate: int, index: int, start: int, numel: int) -> Tensor:
        """Elements of a source, in the wire's dtype: this rank's own, or a copy in scratch memory."""
        source = self._sources[index]
        if coordinate == self.coordinate:
            return to_wire(source[start : start + numel], self._wire_dtype)
        part = self._group.scratch(coordinate, source.dtype, numel)
        self._read(coordinate, index, start, part)
        return to_wire(part, self._wire_dtype)

    def _read(self, coordinate: int, position: int, start: int, destination: Tensor) -> None:
        address = self._address(coordinate, position) + start * destination.itemsize
        self._group.peers[coordinate].read(address, destination)

    def _address(self, coordinate: int, position: int) -> int:
        if coordinate not in self._addresses:
            (table_address,) = _ADDRESS.unpack(self._receive(coordinate, _ADDRESS.size))
            table = torch.empty_like(self._group.table)
            self._group.peers[coordinate].read(table_address, table)
            self._addresses[coordinate] = table.tolist()
        return self._addresses[coordinate][position]

    @property
    def _title(self) -> str:
        return f"{self._name}, step {self._step}"

    def _send(self, message: bytes) -> None:
        whole = b"%b\0%b" % (self._title.encode(), message)
        for peer in self._group.peers.values():
            peer.send(whole)

    def _receive(self, coordinate: int, count_bytes: int) -> bytes:
        peer = self._group.peers[coordinate]
        title, _, message = peer.receive().partition(b"\0")
        if title != self._title.encode() or len(message) != count_bytes:
            raise RuntimeError(
                f"on the communicator '{self._group.name}' rank {peer.rank} carries out {title.decode()}, "
                f"but this rank carries out {self._title}"
            )
        return message


def _in_short(tensors: Sequence[Tensor]) -> str:
    """The dtypes and sizes of tensors; of a long list the first few, and a digest of all."""
    shapes = [f"{tensor.dtype}[{tensor.numel()}]" for tensor in tensors]
    if len(shapes) <= _LISTED:
        return ", ".join(shapes)
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16]
    return f"{', '.join(shapes[:_LISTED])} and {len(shapes) - _LISTED} more, with digest {digest}"


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A flat tensor in chunks, with their offsets."""
    for start in range(0, tensor.numel(), _CHUNK_NUMEL):
        yield start, tensor[start : start + _CHUNK_NUMEL]


def _start(parts: Sequence[Tensor], coordinate: int) -> int:
    """The first element of a coordinate's slice."""
    return sum(part.numel() for part in parts[:coordinate])
