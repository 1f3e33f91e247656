"""Ranks of one communicator on one machine: they send each other the addresses of tensors, and read them.

A waiting rank sleeps in the kernel, and wakes when its peer ends.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from zeroir.runtime.comm.base import DifferentCollectivesError
from zeroir.runtime.comm.peers import Peer

SCRATCH_NUMEL: Final = 1 << 18
"""Elements to read before they are added: enough for few system calls, few enough for the cache."""

_ADDRESS: Final = struct.Struct("=Q")
_LISTED: Final = 8
"""The most tensors that the title of a collective lists individually."""

_CHUNKS: Final = 3
"""The most parts that ``combine`` holds at once."""


@dataclass(slots=True, kw_only=True)
class PeerGroup:
    """A communicator of ``size`` ranks: this rank's coordinate, and its peers on this machine by their coordinates.

    ``machines[i]`` is the index of the machine of coordinate ``i``. ``table`` (u64) has the addresses of this rank's
    tensors in the current collective.
    """

    name: str
    coordinate: int
    size: int
    peers: Mapping[int, Peer]
    machines: Sequence[int]
    collectives_begun: int = 0
    table: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint64))
    _scratch: Tensor | None = field(default=None, init=False)

    def members(self, machine: int) -> Sequence[int]:
        """Return the coordinates on a machine."""
        return [at for at in range(self.size) if self.machines[at] == machine]

    def close(self) -> None:
        """Close the channels to the peers."""
        for peer in self.peers.values():
            peer.close()

    def scratch(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Return memory for at most ``SCRATCH_NUMEL`` elements; ``_CHUNKS`` consecutive turns get different memory."""
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNKS, 8 * SCRATCH_NUMEL, dtype=torch.uint8)
        return self._scratch[turn % _CHUNKS, : numel * dtype.itemsize].view(dtype)


class SharedTensors:
    """This rank's tensors that its peers read, and those of its peers that it reads, in one collective.

    All peers of a group create one together, with one title, and call ``agree`` before any of them changes its tensors.

    Raises:
        DifferentCollectivesError: where another rank starts another collective, or one of other sizes or dtypes.
    """

    def __init__(self, peer_group: PeerGroup, title: str, tensors: Sequence[Tensor]) -> None:
        peer_group.collectives_begun += 1
        self._group = peer_group
        self._name = f"#{peer_group.collectives_begun} {title}"
        self._step = 0
        self._addresses: dict[int, Sequence[int]] = {}
        # The table may have any length, so the peers read it from this memory; it is kept until all have started the
        # next collective.
        peer_group.table = torch.tensor(
            [tensor.data_ptr() for tensor in tensors], dtype=torch.uint64
        )
        self._send(_ADDRESS.pack(peer_group.table.data_ptr()))

    def read(self, coordinate: int, position: int, start: int, destination: Tensor) -> None:
        """Fill a tensor from the ``position``-th tensor of another coordinate, from its ``start``-th element on."""
        address = self._address(coordinate, position) + start * destination.itemsize
        self._group.peers[coordinate].read(address, destination)

    def agree(self) -> None:
        """Wait until every peer has completed this step."""
        for coordinate in self._group.peers:
            # A rank that has read nothing from this peer has not received its table yet.
            self._address(coordinate, 0)
        self._step += 1
        self._send(b"")
        for coordinate in self._group.peers:
            self._receive(coordinate, 0)

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
            raise DifferentCollectivesError(
                f"on the communicator '{self._group.name}' rank {peer.rank} carries out {title.decode()}, "
                f"but this rank carries out {self._title}"
            )
        return message


def in_short(tensors: Sequence[Tensor]) -> str:
    """Return the dtypes and sizes of tensors as text; for a long list the first few, and a digest of all."""
    shapes = [f"{tensor.dtype}[{tensor.numel()}]" for tensor in tensors]
    if len(shapes) <= _LISTED:
        return ", ".join(shapes)
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16]
    return f"{', '.join(shapes[:_LISTED])} and {len(shapes) - _LISTED} more, with digest {digest}"
