"""Ranks on one Linux host that read each other's memory: how they find each other, and the channel between two ranks.

The kernel copies memory from one process to another (``process_vm_readv``) where both belong to the same user and
neither a container's filter nor a namespace forbids it. Every pair of ranks tries it before anything relies on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from zeroir.runtime.comm.base import LostConnectionError

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gathers the bytes of all ranks, of equal length, in rank order; all ranks call it together."""

_MESSAGE_BYTES: Final = 1 << 16
_CREDENTIALS: Final = struct.Struct("=iII")
_PR_SET_PTRACER: Final = 0x59616D61


class _IoVector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("numbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # calls release the interpreter's lock
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def read_memory(pid: int, address: int, destination: int, count_bytes: int) -> None:
    """Copy from an address of another process to an address of this one.

    Raises:
        OSError: where the process has ended (``ESRCH``), forbids it (``EPERM``), or has no such memory (``EFAULT``).
    """
    done = 0
    while done < count_bytes:  # the kernel moves at most 2 GiB a call
        local, remote = (
            _IoVector(destination + done, count_bytes - done),
            _IoVector(address + done, count_bytes - done),
        )
        moved: int = _libc.process_vm_readv(pid, local, 1, remote, 1, 0)
        if moved <= 0:
            number = ctypes.get_errno() if moved < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        done += moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank of a communicator, whose memory this rank reads and with which it exchanges messages."""

    rank: int
    pid: int
    channel: socket.socket

    def send(self, message: bytes) -> None:
        """Send one whole message.

        Raises:
            LostConnectionError: where the rank has ended.
        """
        try:
            self.channel.send(message)
        except OSError as error:
            raise LostConnectionError(f"Rank {self.rank} has ended: {error}") from error

    def receive(self) -> bytes:
        """Wait for the next message, without holding the GIL.

        Raises:
            LostConnectionError: where the rank has ended, or sends nothing within the timeout.
        """
        try:
            message = self.channel.recv(_MESSAGE_BYTES)
        except OSError as error:  # a timeout, too
            raise LostConnectionError(f"Rank {self.rank} does not answer: {error}") from error
        if not message:
            raise LostConnectionError(f"Rank {self.rank} has ended.")
        return message

    def read(self, address: int, destination: Tensor) -> None:
        """Fill a contiguous CPU tensor with the memory at an address of the rank.

        Raises:
            LostConnectionError: where the rank has ended.
        """
        try:
            size_bytes = destination.numel() * destination.itemsize
            read_memory(self.pid, address, destination.data_ptr(), size_bytes)
        except (ProcessLookupError, PermissionError) as error:
            # Reading was allowed when they connected, so a rank that now refuses is about to end.
            raise LostConnectionError(f"Rank {self.rank} has ended.") from error
        except OSError as error:
            raise RuntimeError(f"Reading the memory of rank {self.rank} failed: {error}") from error

    def close(self) -> None:
        """Close the channel, which wakes a peer that waits for a message."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()


_PEER_ADDRESS: Final = struct.Struct("=32sqQ16s")
"""The fields of a ``_PeerAddress`` as bytes, of the same length for every rank."""


class _PeerAddress(NamedTuple):
    """The address of a rank's memory.

    ``secret`` is stored at ``address``, so that readers can recognise the process.
    """

    host: bytes
    pid: int
    address: int
    secret: bytes

    def socket_name(self, index: int) -> str:
        """Return the name of the rank's socket for its ``index``-th group: an abstract name, which leaves no file."""
        return f"\0zeroir.{self.secret.hex()}.{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The result of ``connect_peers``.

    ``peers`` has, for each group, the peers whose memory this rank reads, by rank. ``machines`` divides the ranks of
    the job into sets that read each other's memory, ordered by their first ranks; it is equal on all ranks.
    """

    peers: Sequence[Mapping[int, Peer]]
    machines: Sequence[Sequence[int]]


def connect_peers(
    rank: int, groups: Sequence[Sequence[int]], exchange: Exchange, timeout: timedelta
) -> Connected:
    """Connect this rank to the other ranks of each of its ``groups`` that are on its machine.

    All ranks call this together, with their groups in the same order. Two ranks are on one machine exactly where each
    has read the other's memory; host names do not count. ``timeout`` bounds the wait for each later message.
    """
    # With Yama a process may only read its descendants, unless these name another process whose descendants may read
    # them too: here the launcher, the ancestor of all ranks. Without Yama the call fails, which does not matter.
    _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
    secret = secrets.token_bytes(16)
    readable = ctypes.create_string_buffer(secret, len(secret))
    own = _PeerAddress(
        host=_host(), pid=os.getpid(), address=ctypes.addressof(readable), secret=secret
    )
    peers: list[dict[int, Peer]] = [{} for _ in groups]
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(_new_socket(timeout)) for _ in groups]
        is_listening = True
        try:
            for index, listener in enumerate(listeners):
                listener.bind(own.socket_name(index))
                listener.listen(socket.SOMAXCONN)
        except OSError:
            is_listening = False
        addresses = [
            _PeerAddress(*_PEER_ADDRESS.unpack(data)) for data in exchange(_PEER_ADDRESS.pack(*own))
        ]
        reached = bytearray(len(addresses))
        for peer_rank, address in enumerate(addresses):
            with contextlib.suppress(OSError):
                _require_readable(own, address)
                for index, group in enumerate(groups):
                    if peer_rank in group and peer_rank < rank:
                        channel = _new_socket(timeout)
                        peers[index][peer_rank] = Peer(
                            rank=peer_rank, pid=address.pid, channel=channel
                        )
                        channel.connect(address.socket_name(index))
                reached[peer_rank] = is_listening
        machines = machines_of(exchange(bytes(reached)))
        near = next(machine for machine in machines if rank in machine)
        for group_peers in peers:
            for peer_rank in group_peers.keys() - near:
                group_peers.pop(peer_rank).close()
        # By now every rank has connected to the lower ranks of its machine, so accepting does not block.
        for group, group_peers, listener in zip(groups, peers, listeners, strict=True):
            callers = {
                addresses[higher].pid: higher
                for higher in group
                if higher > rank and higher in near
            }
            while callers:
                channel, _ = listener.accept()
                caller = callers.pop(_pid_of(channel), None)
                if caller is None:  # not a rank of this machine
                    channel.close()
                    continue
                channel.settimeout(timeout.total_seconds())
                pid = addresses[caller].pid
                group_peers[caller] = Peer(rank=caller, pid=pid, channel=channel)
    return Connected(peers=peers, machines=machines)


def machines_of(reached: Sequence[bytes]) -> Sequence[Sequence[int]]:
    """Return the machines of a job: byte ``j`` of row ``i`` is 1 where rank ``i`` has read the memory of rank ``j``.

    Where the ranks do not form disjoint sets that reach each other, each rank counts as a machine of its own.
    """
    ranks = range(len(reached))
    near = [
        tuple(j for j in ranks if i == j or (reached[i][j] == reached[j][i] == 1)) for i in ranks
    ]
    if any(near[j] != near[i] for i in ranks for j in near[i]):
        return [(i,) for i in ranks]
    return sorted(set(near))


def _new_socket(timeout: timedelta) -> socket.socket:
    """Return a local socket that preserves message boundaries and notices at once when its peer ends."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(timeout.total_seconds())
    return channel


def _pid_of(channel: socket.socket) -> int:
    """Return the id of the process at the other end, as the kernel reports it."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def _require_readable(own: _PeerAddress, peer: _PeerAddress) -> None:
    """Raise OSError where this process cannot read the peer's memory."""
    if peer.host != own.host:  # its process id has no meaning here
        raise OSError(errno.EXDEV, "another host")
    secret = ctypes.create_string_buffer(len(peer.secret))
    read_memory(peer.pid, peer.address, ctypes.addressof(secret), len(peer.secret))
    if secret.raw != peer.secret:
        raise OSError(errno.ESRCH, "another process")


def _host() -> bytes:
    """Return 32 bytes, equal on two ranks that share process ids and socket names; random where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return secrets.token_bytes(32)
    return hashlib.sha256(" ".join([boot, *namespaces]).encode()).digest()
