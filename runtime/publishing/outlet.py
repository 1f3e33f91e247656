"""The two ends of a way for weights, and the address at which they meet."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from torch import Tensor

from zeroir.errors import UserError
from zeroir.runtime.publishing.stored_weights import StoredWeights

_HOST_AND_PORT: Final = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class HostAndPort:
    """The place of a store of torch."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def place_of(address: str | os.PathLike[str]) -> Path | HostAndPort:
    """Return the place that an address names: ``host:port``, or the path of a file.

    Raises:
        UserError: where it is neither.
    """
    text = os.fspath(address)
    if isinstance(address, str) and (match := _HOST_AND_PORT.fullmatch(text)):
        port = int(match["port"])
        if not 0 < port < 65536:
            raise UserError(f"'{text}' has the port {port}, but ports are from 1 to 65535.")
        return HostAndPort(match["host"].strip("[]"), port)
    if not text or text.endswith("/") or Path(text).is_dir():
        raise UserError(
            f"'{text}' is no address of weights: give the path of a file, such as /dev/shm/policy.safetensors, or "
            "host:port."
        )
    return Path(text)


class Outlet(Protocol):
    """Where rank 0 puts weights. Every method but ``abandon`` and ``close`` raises UserError where it fails."""

    def is_awaited(self) -> bool:
        """Return whether all receivers are there, for which this waits up to a second."""

    def missing(self) -> str:
        """Return a sentence on the receivers that are not there."""

    def begin(self, header: Callable[[int], bytes], chunks: Sequence[int]) -> int:
        """Begin the next version: its header, and chunks of so many bytes; return its number."""

    def write(self, data: Tensor) -> None:
        """Put the next chunk, u8 on the host, whose memory may be freed then."""

    def finish(self) -> None:
        """End the version: receivers take it from now on."""

    def abandon(self) -> None:
        """Drop the version that has begun, if one has: receivers keep the one before."""

    def close(self) -> None:
        """Release everything but what receivers may still read."""


class Inlet(Protocol):
    """Where a receiver finds weights."""

    def newer(self, version: int) -> AbstractContextManager[StoredWeights | None]:
        """Open weights that this receiver, which has ``version``, has not seen yet; None where there are none.

        Raises:
            UserError: where what is there is no whole version, or the connection breaks before it is.
        """

    def absence(self) -> str:
        """Return a sentence on weights that do not come."""

    def close(self) -> None:
        """Leave."""
