"""Ranks on one Linux host that read each other's memory: who they are, whether they may, and a channel to each.

The kernel copies from one process to another (``process_vm_readv``) where both belong to one user and nothing forbids
it: a container's filter, another namespace. Whether it works is tried, on every pair, before anything relies on it.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final

from torch import Tensor

from zeroir.runtime.comm.base import LostConnectionError

Exchange = Callable[[bytes], Sequence[bytes]]
"""Every rank's equally long bytes, in rank order; all ranks call it alike."""

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


def read_memory(pid: int, address: int, into: int, count_bytes: int) -> None:
    """Copy from another process's address to one of this process.

    Raises:
        OSError: where the process is gone (``ESRCH``), forbids it (``EPERM``), or has no such memory (``EFAULT``).
    """
    done = 0
    while done < count_bytes:  # the kernel moves at most 2 GiB a call
        here, there = (
            _IoVector(into + done, count_bytes - done),
            _IoVector(address + done, count_bytes - done),
        )
        moved: int = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if moved <= 0:
            number = ctypes.get_errno() if moved < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        done += moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank of a communicator: its memory, and messages to and from it."""

    rank: int
    pid: int
    channel: socket.socket

    def send(self, message: bytes) -> None:
        """Send one message, whole.

        Raises:
            LostConnectionError: where the rank is gone.
        """
        try:
            self.channel.send(message)
        except OSError as error:
            raise LostConnectionError(f"Rank {self.rank} is gone: {error}") from error

    def receive(self) -> bytes:
        """The next message; waits for one without holding the interpreter's lock.

        Raises:
            LostConnectionError: where the rank is gone, or says nothing for as long as the timeout allows.
        """
        try:
            message = self.channel.recv(_MESSAGE_BYTES)
        except OSError as error:  # a timeout is one, too
            raise LostConnectionError(f"Rank {self.rank} does not answer: {error}") from error
        if not message:
            raise LostConnectionError(f"Rank {self.rank} is gone.")
        return message

    def read(self, address: int, into: Tensor) -> None:
        """Fill a contiguous CPU tensor with what is at an address of the rank's.

        Raises:
            LostConnectionError: where the rank is gone.
        """
        try:
            read_memory(self.pid, address, into.data_ptr(), into.numel() * into.itemsize)
        except (ProcessLookupError, PermissionError) as error:
            # It was allowed when they met, so who refuses now is about to end.
            raise LostConnectionError(f"Rank {self.rank} is gone.") from error
        except OSError as error:
            raise RuntimeError(f"The memory of rank {self.rank}: {error}") from error

    def close(self) -> None:
        """Hang up; whoever still waits for a message is woken."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerAddress:
    """How a rank introduces itself. ``address`` is where its memory holds ``secret``, by which a reader knows it."""

    host: bytes
    pid: int
    address: int
    secret: bytes

    _LAYOUT: ClassVar = struct.Struct("=32sqQ16s")

    def pack(self) -> bytes:
        """The address as bytes: as many for every rank."""
        return self._LAYOUT.pack(self.host, self.pid, self.address, self.secret)

    @classmethod
    def unpack(cls, data: bytes) -> _PeerAddress:
        """The address that was packed."""
        host, pid, address, secret = cls._LAYOUT.unpack(data)
        return cls(host=host, pid=pid, address=address, secret=secret)

    def socket_name(self, index: int) -> str:
        """Where the rank is called for its ``index``-th group: an abstract name, which leaves no file behind."""
        return f"\0zeroir.{self.secret.hex()}.{index}"


def connect_peers(
    rank: int, groups: Sequence[Sequence[int]], exchange: Exchange, timeout: timedelta
) -> list[dict[int, Peer]] | None:
    """The other ranks of each of this rank's ``groups``, by rank; None, on every rank, where one cannot read another.

    Every rank calls this alike, with its groups in one order. ``timeout`` bounds the wait for each later message.
    """
    # Under Yama a process reads only its descendants, unless those name a process whose descendants may read them,
    # too: the launcher, of which all ranks descend. Elsewhere the call is refused, and does not matter.
    _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
    secret = secrets.token_bytes(16)
    shown = ctypes.create_string_buffer(secret, len(secret))
    address_of_rank = _PeerAddress(
        host=_host(), pid=os.getpid(), address=ctypes.addressof(shown), secret=secret
    )
    found: list[dict[int, Peer]] = [{} for _ in groups]
    with contextlib.ExitStack() as rooms:
        listeners = [rooms.enter_context(_new_socket(timeout)) for _ in groups]
        is_met = True
        try:
            for index, listener in enumerate(listeners):
                listener.bind(address_of_rank.socket_name(index))
                listener.listen(socket.SOMAXCONN)
        except OSError:
            is_met = False
        addresses = [_PeerAddress.unpack(data) for data in exchange(address_of_rank.pack())]
        try:
            for index, group in enumerate(groups):
                for other in group:
                    _require_readable(address_of_rank, addresses[other])
                    if other < rank:
                        channel = _new_socket(timeout)
                        found[index][other] = Peer(
                            rank=other, pid=addresses[other].pid, channel=channel
                        )
                        channel.connect(addresses[other].socket_name(index))
        except OSError:
            is_met = False
        if exchange(bytes([is_met])) != [b"\1"] * len(addresses):
            for known in found:
                for peer in known.values():
                    peer.close()
            return None
        # All have called by now, so nobody is waited for.
        for group, known, listener in zip(groups, found, listeners, strict=True):
            callers = {addresses[other].pid: other for other in group if other > rank}
            while callers:
                channel, _ = listener.accept()
                caller = callers.pop(_pid_of(channel), None)
                if caller is None:  # a stranger
                    channel.close()
                    continue
                channel.settimeout(timeout.total_seconds())
                known[caller] = Peer(rank=caller, pid=addresses[caller].pid, channel=channel)
    return found


def _new_socket(timeout: timedelta) -> socket.socket:
    """A local socket that keeps messages apart and sees its peer's end at once."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout.total_seconds())
    return made


def _pid_of(channel: socket.socket) -> int:
    """Whose socket is at the other end, by the kernel's word."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def _require_readable(own: _PeerAddress, other: _PeerAddress) -> None:
    """Raise an OSError where the other rank's memory cannot be read from here."""
    if other.host != own.host:  # its process id means nothing here
        raise OSError(errno.EXDEV, "another host")
    seen = ctypes.create_string_buffer(len(other.secret))
    read_memory(other.pid, other.address, ctypes.addressof(seen), len(other.secret))
    if seen.raw != other.secret:
        raise OSError(errno.ESRCH, "another process")


def _host() -> bytes:
    """32 bytes that are equal where process ids and socket names mean the same; never equal where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return secrets.token_bytes(32)
    return hashlib.sha256(" ".join([boot, *spaces]).encode()).digest()
