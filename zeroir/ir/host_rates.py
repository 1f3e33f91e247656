"""Measured transfer rates of a host and of a disk for one rank, while all ranks of its node measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHost:
    """Bytes per second of one rank.

    ``to_device``, ``to_host`` and ``both`` count the bytes that are copied, ``memory`` and ``update`` the sum of bytes
    read and bytes written. ``copy_s`` is the time of a small copy in seconds.
    """

    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    both_bytes_per_s: float
    copy_s: float
    memory_bytes_per_s: float
    update_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDisk:
    """Bytes per second of one rank: read, written, and both at once.

    ``request_s`` is the time of a small read in seconds.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    request_s: float
