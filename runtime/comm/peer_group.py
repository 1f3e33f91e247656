"""Ranks of one communicator on one machine: they tell each other the addresses of tensors, and read them.

Waiting ranks sleep in the kernel, and a rank that ends wakes those that wait for it.
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
"""Elements that are read before they are added: few system calls, and still in the cache."""

_ADDRESS: Final = struct.Struct("=Q")
_LISTED: Final = 8
"""The most tensors that the title of a collective lists one by one."""

_CHUNKS: Final = 3
"""The most parts that ``combine`` holds at once."""


@dataclass(slots=True, kw_only=True)
class PeerGroup:
    """A communicator of ``size`` ranks: this rank's coordinate, and its peers on this machine by theirs.

    ``machines[i]`` is the number of the machine that coordinate ``i`` is on. ``table`` (u64) holds the addresses
    of this rank's tensors in the current collective.
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
        """The coordinates on a machine."""
        return [at for at in range(self.size) if self.machines[at] == machine]

    def close(self) -> None:
        """Close the channels to the peers."""
        for peer in self.peers.values():
            peer.close()

    def scratch(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for at most ``SCRATCH_NUMEL`` elements; ``_CHUNKS`` turns in a row get different memory."""
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNKS, 8 * SCRATCH_NUMEL, dtype=torch.uint8)
        return self._scratch[turn % _CHUNKS, : numel * dtype.itemsize].view(dtype)


class SharedTensors:
    """Tensors of this rank that its peers read, and those of its peers that it reads, in one collective.

    All peers of a group make one together, with one title, and ``agree`` before any of them changes its tensors.

    Raises:
        DifferentCollectivesError: where another rank begins another collective, or one of other sizes or dtypes.
    """

    def __init__(self, peer_group: PeerGroup, title: str, tensors: Sequence[Tensor]) -> None:
        peer_group.collectives_begun += 1
        self._group = peer_group
        self._name = f"#{peer_group.collectives_begun} {title}"
        self._step = 0
        self._addresses: dict[int, Sequence[int]] = {}
        # Of any length, so the peers read it from this memory; it stays until all have begun the next collective.
        peer_group.table = torch.tensor(
            [tensor.data_ptr() for tensor in tensors], dtype=torch.uint64
        )
        self._send(_ADDRESS.pack(peer_group.table.data_ptr()))

    def read(self, coordinate: int, position: int, start: int, destination: Tensor) -> None:
        """Fill a tensor from another coordinate's tensor at a position, from its ``start``-th element on."""
        address = self._address(coordinate, position) + start * destination.itemsize
        self._group.peers[coordinate].read(address, destination)

    def agree(self) -> None:
        """Return when every peer has completed this step."""
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
    """The dtypes and sizes of tensors; of a long list the first few, and a digest of all."""
    shapes = [f"{tensor.dtype}[{tensor.numel()}]" for tensor in tensors]
    if len(shapes) <= _LISTED:
        return ", ".join(shapes)
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16]
    return f"{', '.join(shapes[:_LISTED])} and {len(shapes) - _LISTED} more, with digest {digest}"
