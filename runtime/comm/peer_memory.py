"""Collectives between ranks of one host that read each other's memory: one copy, no sockets, sums in rank order.

In every collective each rank tells the others where its tensors are, reads what it needs straight to where it belongs,
and returns when all have read, since its sources may be overwritten then. Nobody spins: who waits is asleep in the
kernel, and a rank that ends wakes all who wait for it.
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
from zeroir.runtime.comm.base import CollectiveTensors, combine, to_wire
from zeroir.runtime.comm.peers import Exchange, Peer, connect_peers
from zeroir.workspace.collective_scratch import SMALL_NUMEL

_CHUNK_NUMEL: Final = 1 << 18
"""What is read before it is added: few calls, and still in the cache."""

_ADDRESS: Final = struct.Struct("=Q")
_SHOWN: Final = 8
"""How many tensors of a collective its title names one by one."""

_CHUNKS: Final = 3
"""How many parts ``combine`` may hold at once."""


@dataclass(slots=True, kw_only=True)
class PeerGroup:
    """The ranks of one communicator: this rank's coordinate, and the others by theirs.

    ``table`` (u64) is where this rank's tensors are in the collective that is under way.
    """

    name: str
    coordinate: int
    size: int
    peers: Mapping[int, Peer]
    collectives_begun: int = 0
    table: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint64))
    _scratch: Tensor | None = field(default=None, init=False)

    def scratch(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for at most ``_CHUNK_NUMEL`` elements, another in each of ``_CHUNKS`` turns."""
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNKS, 8 * _CHUNK_NUMEL, dtype=torch.uint8)
        return self._scratch[turn % _CHUNKS, : numel * dtype.itemsize].view(dtype)


def open_peer_memory(
    program: Program, rank: int, exchange: Exchange, timeout: timedelta
) -> PeerMemoryComm | None:
    """Collectives over every communicator of a program; None, on every rank, where one cannot read another's memory.

    Every rank calls this alike. ``timeout`` bounds how long a rank is waited for in a collective.
    """
    groups = [
        next(group for group in program.mesh.groups(comm.axis) if rank in group)
        for comm in program.comms
    ]
    others = [[other for other in group if other != rank] for group in groups]
    met = connect_peers(rank, others, exchange, timeout)
    if met is None:
        return None
    return PeerMemoryComm(
        {
            comm.name: PeerGroup(
                name=comm.name,
                coordinate=group.index(rank),
                size=len(group),
                peers={group.index(other): found for other, found in known.items()},
            )
            for comm, group, known in zip(program.comms, groups, met, strict=True)
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
            for at in collective.coordinates():
                collective.fetch(at, index, slots[at])
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
            for at in collective.coordinates():
                if at != collective.coordinate:
                    collective.fetch_result(at, index, _start(parts, at), parts[at])
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

    def _open(self, what: str, tensors: CollectiveTensors) -> _OpenCollective:
        return _OpenCollective(self._groups[tensors.comm], what, tensors)


class _OpenCollective:
    """One collective of one communicator: everyone's tensors, where they are, and who has come how far.

    Raises:
        RuntimeError: where another rank is at another collective, or at one of other sizes or dtypes.
    """

    def __init__(self, peer_group: PeerGroup, what: str, tensors: CollectiveTensors) -> None:
        peer_group.collectives_begun += 1
        self.size = peer_group.size
        self.coordinate = peer_group.coordinate
        self._group = peer_group
        self._wire_dtype = tensors.wire_dtype
        pairs = tensors.pairs[0]
        self._sources = [pair.source for pair in pairs]
        self._destinations = [pair.destination for pair in pairs]
        self._what = f"#{peer_group.collectives_begun} {what} of {_in_short(self._sources)}"
        self._step = 0
        self._addresses: dict[int, Sequence[int]] = {}
        # Of any length, so the others read it where it is; it stays until all have begun the next collective.
        peer_group.table = torch.tensor(
            [tensor.data_ptr() for tensor in (*self._sources, *self._destinations)],
            dtype=torch.uint64,
        )
        self._tell(_ADDRESS.pack(peer_group.table.data_ptr()))

    def coordinates(self) -> Iterator[int]:
        """All coordinates, this rank's first and the others from there on, so that not all read one at a time."""
        return ((self.coordinate + step) % self.size for step in range(self.size))

    def fetch(self, at: int, index: int, into: Tensor) -> None:
        """Copy the whole ``index``-th source of a coordinate, rounded to the wire's dtype on the way."""
        source = self._sources[index]
        is_plain = into.dtype == source.dtype and self._wire_dtype in (None, source.dtype)
        if is_plain and at != self.coordinate:
            self._read(at, index, 0, into)
        elif not is_plain or into.data_ptr() != source.data_ptr():
            for start, chunk in _chunks(into):
                chunk.copy_(self._part(at, index, start, chunk.numel()))

    def fetch_result(self, at: int, index: int, start: int, into: Tensor) -> None:
        """Copy from the ``index``-th destination of another coordinate, from the ``start``-th element on."""
        self._read(at, len(self._sources) + index, start, into)

    def combine(self, index: int, start: int, reduction: Reduction, into: Tensor) -> None:
        """Combine everyone's ``index``-th sources from the ``start``-th element on, in rank order."""
        for offset, chunk in _chunks(into):
            parts = (
                self._part(at, index, start + offset, chunk.numel()) for at in range(self.size)
            )
            combine(parts, reduction, chunk)

    def agree(self) -> None:
        """Return when every rank has come this far."""
        for at in self._group.peers:
            self._address(at, 0)  # who had nothing to read from a rank has not heard it yet
        self._step += 1
        self._tell(b"")
        for at in self._group.peers:
            self._hear(at, 0)

    def _part(self, at: int, index: int, start: int, numel: int) -> Tensor:
        """Elements of a source as they travel: this rank's own, or in the scratch of this coordinate's turn."""
        source = self._sources[index]
        if at == self.coordinate:
            return to_wire(source[start : start + numel], self._wire_dtype)
        part = self._group.scratch(at, source.dtype, numel)
        self._read(at, index, start, part)
        return to_wire(part, self._wire_dtype)

    def _read(self, at: int, position: int, start: int, into: Tensor) -> None:
        address = self._address(at, position) + start * into.itemsize
        self._group.peers[at].read(address, into)

    def _address(self, at: int, position: int) -> int:
        if at not in self._addresses:
            (place,) = _ADDRESS.unpack(self._hear(at, _ADDRESS.size))
            table = torch.empty_like(self._group.table)
            self._group.peers[at].read(place, table)
            self._addresses[at] = table.tolist()
        return self._addresses[at][position]

    @property
    def _title(self) -> str:
        return f"{self._what}, step {self._step}"

    def _tell(self, message: bytes) -> None:
        whole = b"%b\0%b" % (self._title.encode(), message)
        for peer in self._group.peers.values():
            peer.send(whole)

    def _hear(self, at: int, count_bytes: int) -> bytes:
        peer = self._group.peers[at]
        title, _, message = peer.receive().partition(b"\0")
        if title != self._title.encode() or len(message) != count_bytes:
            raise RuntimeError(
                f"on the communicator '{self._group.name}' rank {peer.rank} is at {title.decode()}, "
                f"but this rank at {self._title}"
            )
        return message


def _in_short(tensors: Sequence[Tensor]) -> str:
    """The dtypes and sizes of tensors, of many of them a digest in the place of most."""
    shapes = [f"{tensor.dtype}[{tensor.numel()}]" for tensor in tensors]
    if len(shapes) <= _SHOWN:
        return ", ".join(shapes)
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16]
    return f"{', '.join(shapes[:_SHOWN])} and {len(shapes) - _SHOWN} more, of digest {digest}"


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A flat tensor in chunks, with their offsets."""
    for start in range(0, tensor.numel(), _CHUNK_NUMEL):
        yield start, tensor[start : start + _CHUNK_NUMEL]


def _start(parts: Sequence[Tensor], at: int) -> int:
    """Where the slice of a coordinate begins."""
    return sum(part.numel() for part in parts[:at])
