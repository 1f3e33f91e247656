"""The memory that a run uses outside the device: a note about it, and a check that the machine has enough."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from zeroir.errors import UserError
from zeroir.ir.buffers import Role, Space
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.memory.states import snapshot_bytes
from zeroir.report.names import counted

_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux lists the memory limit of a process's control group, in versions 2 and 1."""


_NOT_OFFLOADED: Final = (Role.SCALAR, Role.RNG, Role.SNAPSHOT)
"""Roles of buffers that are in host memory even without offloading."""


def outside_bytes(program: Program) -> Mapping[Space, int]:
    """Return the bytes of a rank in host memory, without snapshots, and on the disk; empty without offloading."""
    kept = {
        buffer.space
        for buffer in program.buffers
        if buffer.space is not Space.DEVICE and buffer.role not in _NOT_OFFLOADED
    }
    sizes: dict[Space, int] = {
        space: footprint(program, space=space).total_bytes
        for space in (Space.HOST, Space.DISK)
        if space in kept
    }
    if Space.HOST in sizes:
        sizes[Space.HOST] -= snapshot_bytes(program)
    return sizes


def outside_note(sizes: Mapping[Space, int]) -> str | None:
    """Return a note on what each rank keeps outside device memory; None if that is nothing."""
    places = {Space.HOST: "in host memory", Space.DISK: "on the disk"}
    said = [f"{format_bytes(size)} {places[space]}" for space, size in sizes.items()]
    return f"Each rank keeps {' and '.join(said)}." if said else None


def require_host_memory(
    sizes: Mapping[Space, int], *, ranks: int, memory_bytes: int | None
) -> None:
    """Check that a machine has the host memory that its ranks need; ``memory_bytes`` is None if unknown.

    Raises:
        UserError: naming both amounts. Otherwise, the system would kill a rank in the middle of training.
    """
    needed = sizes.get(Space.HOST, 0) * ranks
    if memory_bytes is None or needed <= memory_bytes:
        return
    raise UserError(
        f"What {counted(ranks, 'rank')} of this machine keep in host memory takes {format_bytes(needed)}, but it has "
        f"{format_bytes(memory_bytes)}: offload less, start fewer ranks on it, or let a disk keep it with --offload-to "
        "disk:FOLDER."
    )


def require_disk_folder(sizes: Mapping[Space, int], folder: str | None) -> None:
    """Check that the disk's folder exists if it is needed; None is the folder for temporary files.

    Raises:
        UserError: naming the folder. Otherwise every rank would report the error.
    """
    if Space.DISK in sizes and folder is not None and not Path(folder).is_dir():
        raise UserError(
            f"There is no folder '{folder}' for what the disk keeps: make it, or name another with --offload-to "
            "disk:FOLDER."
        )


def local_ranks() -> int:
    """Return the number of the job's ranks on this machine, as torchrun sets it; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def host_memory_bytes() -> int | None:
    """Return the memory of this machine, or the limit of this process's control group if less; None if unknown."""
    amounts: list[int] = []
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            amounts.append(int(text))
    with suppress(OSError, ValueError):
        amounts.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(amounts, default=None)
