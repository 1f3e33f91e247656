"""The bytes of staging: the temporary buffers for copies between the device, the host and the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zeroir.ir.bounds import BoundKind, bounded_buffers
from zeroir.ir.buffers import Role, Space
from zeroir.ir.program import Program
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.memory.placement import rounded

_ON_DEVICE: Final = frozenset({BoundKind.DEVICE_STAGING, BoundKind.PAGES})


def staging_bytes(program: Program) -> Mapping[Space, int]:
    """Return the most bytes of staging live at once on a rank, in any order that the program allows, by space.

    On the device these are pages, and the buffers of the role ``staging`` that copies fill or empty; in host memory all
    of that role, because only ops of the host use them. Each counts as many bytes as in the block of temporary buffers.
    Spaces without staging are omitted.
    """
    kinds = bounded_buffers(program.buffers, program.ops())
    names: dict[Space, set[str]] = {
        Space.DEVICE: {name for name, kind in kinds.items() if kind in _ON_DEVICE},
        Space.HOST: {
            buffer.name
            for buffer in program.buffers
            if buffer.role is Role.STAGING and buffer.space is Space.HOST
        },
    }
    if not any(names.values()):
        return {}
    lifetimes = Lifetimes.of(program)
    buffers = [program.buffer_by_name[name] for name in lifetimes.buffers]
    sizes = [rounded(buffer.size_bytes, buffer.space) for buffer in buffers]
    return {
        space: most_live(
            lifetimes, [n for n, buffer in enumerate(buffers) if buffer.name in staging], sizes
        ).size_bytes
        for space, staging in names.items()
        if staging
    }
