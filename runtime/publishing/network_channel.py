"""Weights on the way to other machines: a store of torch on rank 0, and a gloo group for each version.

Rank 0 opens a version in the store, and receivers join it. When as many have come as it waits for, they form a group
with it, in which it broadcasts the header and then each chunk. A version counts once all of its bytes have come to all
receivers of the group; until then they keep it aside, in memory that vanishes with the process. Groups are never used
again, so a receiver that is killed or added concerns no version but its own.

Keys of the store: ``open`` has the number of the last version that was opened, ``NUMBER/joined`` counts who joined it,
``NUMBER/name/MEMBER`` says who that is, ``NUMBER/left/MEMBER`` that it gave up, and ``NUMBER/go`` how many members the
group has, none where the version is off, and how many bytes each broadcast has.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zeroir.errors import UserError
from zeroir.runtime.comm._gloo_private import GlooGroup
from zeroir.runtime.distributed.interfaces import own_address_towards
from zeroir.runtime.distributed.rank_discovery import KeyValueStore
from zeroir.runtime.publishing.outlet import HostAndPort
from zeroir.runtime.publishing.stored_weights import StoredWeights, opened

_OPEN: Final = "open"
_POLL: Final = timedelta(seconds=1)
_GRACE_S: Final = 3.0
"""How long rank 0 waits for the receivers that are alive to say that a version has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """This process is a member of the version of a ``number``, of ``size`` members; ``chunks`` are bytes."""

    number: int
    member: int
    size: int
    chunks: Sequence[int]


def _group(
    store: KeyValueStore, own: _Membership, place: HostAndPort, timeout: timedelta
) -> GlooGroup:
    """Return the group of a version: rank 0 is its first member, and sends."""
    prefixed: KeyValueStore = dist.PrefixStore(f"{own.number}/group", cast("Any", store))  # type: ignore[attr-defined]
    address = own_address_towards(place.host, place.port)
    return GlooGroup(prefixed, own.member, own.size, address=address, timeout=timeout)


class NetworkOutlet:
    """Broadcasts weights to the expected receivers, from a store at ``place``.

    Raises:
        UserError: where this machine has no such address, or the port is taken.
    """

    def __init__(self, place: HostAndPort) -> None:
        self._place = place
        self._receivers, self._timeout = 1, _POLL
        self._version = self._number = 0
        self._is_open = False
        self._group: GlooGroup | None = None
        try:
            self._store = _store(place, is_host=True)
        except RuntimeError as error:
            raise UserError(
                f"Rank 0 cannot publish at {place}: {_first_line(error)}. Give a host name or address of its machine, "
                "and a free port."
            ) from error

    def expect(self, receivers: int, timeout: timedelta) -> None:
        """Set for how many receivers the next version is, and how long they may take."""
        self._receivers, self._timeout = receivers, timeout

    def is_awaited(self) -> bool:
        if not self._is_open:
            self._number += 1
            self._is_open = True
            self._store.set(_OPEN, str(self._number))
        names = [f"{self._number}/name/{member}" for member in self._members]
        try:
            self._store.wait(names, _POLL)
        except dist.DistStoreError:
            return False
        return True

    def missing(self) -> str:
        present = self._names()
        came = f" ({', '.join(present)})" if present else ""
        return (
            f"{len(present)} of {self._receivers} receivers{came} asked for new weights at {self._place} within "
            f"{self._timeout.total_seconds():.0f} s: look at what the others printed, or publish with receivers="
            f"{len(present) or 1}."
        )

    def begin(self, header: Callable[[int], bytes], chunks: Sequence[int]) -> int:
        known = [json.loads(self._record(member))["version"] for member in self._members]
        self._version = 1 + max(self._version, *known)
        beginning = header(self._version)
        own = _Membership(
            number=self._number,
            member=0,
            size=1 + self._receivers,
            chunks=[len(beginning), *chunks],
        )
        self._go(own.size, own.chunks)
        with suppress(RuntimeError):
            self._group = _group(self._store, own, self._place, self._timeout)
        if self._group is None:
            raise self._lost()
        self._broadcast(torch.frombuffer(bytearray(beginning), dtype=torch.uint8))
        return self._version

    def write(self, data: Tensor) -> None:
        self._broadcast(data)
        # Gloo's threads may hold the tensor while the next one is gathered.
        data.untyped_storage().resize_(0)

    def finish(self) -> None:
        self._do(GlooGroup.agree)
        self._group, self._is_open = None, False

    def abandon(self) -> None:
        if self._is_open:
            self._group, self._is_open = None, False
            self._go(0, [])

    def close(self) -> None:
        self.abandon()
        del self._store

    @property
    def _members(self) -> range:
        return range(1, 1 + self._receivers)

    def _record(self, member: int) -> bytes:
        return self._store.get(f"{self._number}/name/{member}")

    def _names(self) -> list[str]:
        keys = [(each, f"{self._number}/name/{each}") for each in self._members]
        return [
            str(json.loads(self._record(each))["name"])
            for each, key in keys
            if self._store.check([key])
        ]

    def _go(self, size: int, chunks: Sequence[int]) -> None:
        self._store.set(f"{self._number}/go", json.dumps([size, *chunks]))

    def _broadcast(self, data: Tensor) -> None:
        self._do(lambda group: group.broadcast(data))

    def _do(self, action: Callable[[GlooGroup], None]) -> None:
        """Do what fails where a receiver is lost."""
        assert self._group is not None
        with suppress(RuntimeError):
            action(self._group)
            return
        # Nothing else refers to the group, not even an error, so its end breaks the connections of the others.
        self._group = None
        raise self._lost()

    def _lost(self) -> UserError:
        """Return the error that names the receivers that are lost: those that do not say that the version failed."""
        names = dict(zip(self._members, self._names(), strict=True))
        deadline = time.monotonic() + _GRACE_S
        silent = list(names)
        while silent and time.monotonic() < deadline:
            time.sleep(0.02)
            silent = [m for m in names if not self._store.check([f"{self._number}/left/{m}"])]
        lost = ", ".join(names[member] for member in silent or names)
        return UserError(
            f"Version {self._version} of the weights was not published, because {lost} ended, or did not answer for "
            f"{self._timeout.total_seconds():.0f} s: look at what it printed. Receivers keep the version that they "
            "had, and training may go on."
        )


class NetworkInlet:
    """Receives weights from the store at ``place``."""

    def __init__(self, place: HostAndPort, timeout: timedelta) -> None:
        self._place = place
        self._timeout = timeout
        self._seen = 0
        self._store: KeyValueStore | None = None

    @contextmanager
    def newer(self, version: int) -> Iterator[StoredWeights | None]:
        number = self._opened_number()
        if number is None:
            yield None
            return
        with self._explained(version):
            joined = self._joined(number, version)
        if joined is None:
            yield None
            return
        descriptor = os.memfd_create("zeroir-weights", os.MFD_CLOEXEC)
        try:
            with self._explained(version):
                self._receive(descriptor, joined)
            with opened(f"/proc/self/fd/{descriptor}") as weights:
                yield weights
        finally:
            os.close(descriptor)

    def absence(self) -> str:
        if self._store is None:
            return f"no engine publishes at {self._place}"
        return f"no newer weights have come from {self._place}"

    def close(self) -> None:
        self._store = None

    @contextmanager
    def _explained(self, version: int) -> Iterator[None]:
        """Explain a connection that breaks; the next call connects anew."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._store = None
            kept = f"keeps version {version}" if version else "is as it was"
            raise UserError(
                f"New weights from {self._place} have not come whole, so the module {kept}: rank 0 of the training job "
                "or another receiver ended or hangs. Look at what they printed, and call update() again."
            ) from error

    def _connected(self) -> KeyValueStore | None:
        """Return the store, if rank 0 has opened it."""
        if self._store is None:
            try:
                # The store itself would wait.
                socket.create_connection((self._place.host, self._place.port), 1.0).close()
                self._store = _store(self._place)
            except (OSError, RuntimeError):
                return None
            self._seen = 0
        return self._store

    def _opened_number(self) -> int | None:
        """Return the number of a version that waits for receivers and has not seen this one; None without any."""
        store = self._connected()
        try:
            if store is None or not store.check([_OPEN]):
                return None
            number = int(store.get(_OPEN))
            is_open = number != self._seen and not store.check([f"{number}/go"])
        except RuntimeError:
            self._store = None  # Rank 0 has ended; another one may come.
            return None
        return number if is_open else None

    def _joined(self, number: int, version: int) -> _Membership | None:
        """Join a version, and wait until it begins; None where it does so without this receiver, or never."""
        store = self._store
        assert store is not None
        self._seen = number
        member = store.add(f"{number}/joined", 1)
        name = f"process {os.getpid()} on {socket.gethostname()}"
        store.set(f"{number}/name/{member}", json.dumps({"name": name, "version": version}))
        store.wait([f"{number}/go"], self._timeout)
        size, *chunks = json.loads(store.get(f"{number}/go"))
        if member >= size:
            return None
        return _Membership(number=number, member=member, size=size, chunks=chunks)

    def _receive(self, descriptor: int, joined: _Membership) -> None:
        """Receive a version into a file."""
        store, number, size_bytes = self._store, joined.number, sum(joined.chunks)
        assert store is not None
        try:
            _allocate(descriptor, size_bytes)
            memory = torch.frombuffer(mmap(descriptor, size_bytes), dtype=torch.uint8)
            group = _group(store, joined, self._place, self._timeout)
            for chunk in torch.split(memory, list(joined.chunks)):
                group.broadcast(chunk)
            group.agree()
        except (RuntimeError, OSError, UserError):
            with suppress(RuntimeError):
                store.set(f"{number}/left/{joined.member}", "")
            raise


def _allocate(descriptor: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise UserError(
            f"New weights need {size_bytes:,} bytes of this host's memory while they come ({error.strerror}): free "
            "memory, or publish at a path."
        ) from error


def _store(place: HostAndPort, *, is_host: bool = False) -> KeyValueStore:
    store: KeyValueStore = dist.TCPStore(  # type: ignore[attr-defined]
        place.host, place.port, is_master=is_host, wait_for_workers=False, timeout=5 * _POLL
    )
    return store


def _first_line(error: Exception) -> str:
    return " ".join(str(error).partition("\n")[0].split()).rstrip(".")
