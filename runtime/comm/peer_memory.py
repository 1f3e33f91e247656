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
from zeroir.runtime.comm.base import SMALL_NUMEL, Launch, combine, to_wire
from zeroir.runtime.comm.neighbours import Exchange, Neighbour, meet

_CHUNK_NUMEL: Final = 1 << 18
"""What is read before it is added: few calls, and still in the cache."""

_ADDRESS: Final = struct.Struct("=Q")
_SHOWN: Final = 8
"""How many tensors of a collective its title names one by one."""

_CHUNKS: Final = 3
"""How many parts ``combine`` may hold at once."""


@dataclass(slots=True, kw_only=True)
class Circle:
    """The ranks of one communicator: this rank's coordinate, and the others by theirs.

    ``table`` (u64) is where this rank's tensors are in the meeting that is under way.
    """

    name: str
    coordinate: int
    size: int
    neighbours: Mapping[int, Neighbour]
    meetings: int = 0
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
    met = meet(rank, others, exchange, timeout)
    if met is None:
        return None
    return PeerMemoryComm(
        {
            comm.name: Circle(
                name=comm.name,
                coordinate=group.index(rank),
                size=len(group),
                neighbours={group.index(other): found for other, found in known.items()},
            )
            for comm, group, known in zip(program.comms, groups, met, strict=True)
        }
    )


class PeerMemoryComm:
    """Collectives of one rank whose peers are its neighbours; ``circles`` holds those of each communicator."""

    def __init__(self, circles: Mapping[str, Circle]) -> None:
        self._circles = circles

    def all_gather(self, launch: Launch) -> None:
        """See ``Comm.all_gather``."""
        meeting = self._meet("all_gather", launch)
        for index, piece in enumerate(launch.pieces[0]):
            slots = piece.destination.view(meeting.size, -1)
            for at in meeting.coordinates():
                meeting.fetch(at, index, slots[at])
        meeting.agree()

    def reduce_scatter(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``."""
        meeting = self._meet(f"reduce_scatter by {reduction}", launch)
        for index, piece in enumerate(launch.pieces[0]):
            start = meeting.coordinate * piece.destination.numel()
            meeting.combine(index, start, reduction, piece.destination)
        meeting.agree()

    def all_reduce(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``: the reduce_scatter above and an all_gather."""
        pieces = launch.pieces[0]
        meeting = self._meet(f"all_reduce by {reduction}", launch)
        if sum(piece.source.numel() for piece in pieces) <= SMALL_NUMEL:
            totals = [torch.empty_like(piece.destination) for piece in pieces]
            for index, total in enumerate(totals):
                meeting.combine(index, 0, reduction, total)
            meeting.agree()
            for piece, total in zip(pieces, totals, strict=True):
                piece.destination.copy_(total)
            return
        slices = [piece.destination.tensor_split(meeting.size) for piece in pieces]
        for index, parts in enumerate(slices):
            own = parts[meeting.coordinate]
            meeting.combine(index, _start(parts, meeting.coordinate), reduction, own)
        meeting.agree()
        for index, parts in enumerate(slices):
            for at in meeting.coordinates():
                if at != meeting.coordinate:
                    meeting.fetch_result(at, index, _start(parts, at), parts[at])
        meeting.agree()

    def broadcast(self, launch: Launch, root: int) -> None:
        """See ``Comm.broadcast``."""
        meeting = self._meet(f"broadcast from {root}", launch)
        for index, piece in enumerate(launch.pieces[0]):
            meeting.fetch(root, index, piece.destination)
        meeting.agree()

    def close(self) -> None:
        """Hang up on the neighbours."""
        for circle in self._circles.values():
            for neighbour in circle.neighbours.values():
                neighbour.close()

    def _meet(self, what: str, launch: Launch) -> _Meeting:
        return _Meeting(self._circles[launch.comm], what, launch)


class _Meeting:
    """One collective of one communicator: everyone's tensors, where they are, and who has come how far.

    Raises:
        RuntimeError: where another rank is at another collective, or at one of other sizes or dtypes.
    """

    def __init__(self, circle: Circle, what: str, launch: Launch) -> None:
        circle.meetings += 1
        self.size = circle.size
        self.coordinate = circle.coordinate
        self._circle = circle
        self._wire_dtype = launch.wire_dtype
        pieces = launch.pieces[0]
        self._sources = [piece.source for piece in pieces]
        self._destinations = [piece.destination for piece in pieces]
        self._what = f"#{circle.meetings} {what} of {_in_short(self._sources)}"
        self._step = 0
        self._addresses: dict[int, Sequence[int]] = {}
        # Of any length, so the others read it where it is; it stays until all have come to the next meeting.
        circle.table = torch.tensor(
            [tensor.data_ptr() for tensor in (*self._sources, *self._destinations)],
            dtype=torch.uint64,
        )
        self._tell(_ADDRESS.pack(circle.table.data_ptr()))

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
        for at in self._circle.neighbours:
            self._address(at, 0)  # who had nothing to read from a rank has not heard it yet
        self._step += 1
        self._tell(b"")
        for at in self._circle.neighbours:
            self._hear(at, 0)

    def _part(self, at: int, index: int, start: int, numel: int) -> Tensor:
        """Elements of a source as they travel: this rank's own, or in the scratch of this coordinate's turn."""
        source = self._sources[index]
        if at == self.coordinate:
            return to_wire(source[start : start + numel], self._wire_dtype)
        part = self._circle.scratch(at, source.dtype, numel)
        self._read(at, index, start, part)
        return to_wire(part, self._wire_dtype)

    def _read(self, at: int, position: int, start: int, into: Tensor) -> None:
        address = self._address(at, position) + start * into.itemsize
        self._circle.neighbours[at].read(address, into)

    def _address(self, at: int, position: int) -> int:
        if at not in self._addresses:
            (place,) = _ADDRESS.unpack(self._hear(at, _ADDRESS.size))
            table = torch.empty_like(self._circle.table)
            self._circle.neighbours[at].read(place, table)
            self._addresses[at] = table.tolist()
        return self._addresses[at][position]

    @property
    def _title(self) -> str:
        return f"{self._what}, step {self._step}"

    def _tell(self, message: bytes) -> None:
        whole = b"%b\0%b" % (self._title.encode(), message)
        for neighbour in self._circle.neighbours.values():
            neighbour.send(whole)

    def _hear(self, at: int, count_bytes: int) -> bytes:
        neighbour = self._circle.neighbours[at]
        title, _, message = neighbour.receive().partition(b"\0")
        if title != self._title.encode() or len(message) != count_bytes:
            raise RuntimeError(
                f"on the communicator '{self._circle.name}' rank {neighbour.rank} is at {title.decode()}, "
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
    """A flat tensor in pieces, with their offsets."""
    for start in range(0, tensor.numel(), _CHUNK_NUMEL):
        yield start, tensor[start : start + _CHUNK_NUMEL]


def _start(parts: Sequence[Tensor], at: int) -> int:
    """Where the slice of a coordinate begins."""
    return sum(part.numel() for part in parts[:at])
