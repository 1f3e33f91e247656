"""The bytes of staging: the temporary buffers for copies between the device, the host and the disk."""

from __future__ import annotations

from collections.abc import Mapping

from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.program import Program
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.memory.placement import rounded


def staging_bytes(program: Program) -> Mapping[Space, int]:
    """Return the most bytes of staging live at once on a rank, in any order that the program allows, by space.

    On the device these are pages, and the buffers of the role ``staging`` that copies fill or empty; in host memory all
    of that role, because only ops of the host use them. Each counts as many bytes as in the block of temporary buffers.
    Spaces without staging are omitted.
    """
    transfers = [op for op in program.ops() if isinstance(op, ops.Transfer)]
    moved = {region.buffer for op in transfers for region in (op.source, op.destination)}
    names: dict[Space, set[str]] = {Space.DEVICE: set(), Space.HOST: set()}
    for buffer in program.buffers:
        match buffer.space, buffer.role:
            case (Space.HOST, Role.STAGING) | (Space.DEVICE, Role.PAGE):
                names[buffer.space].add(buffer.name)
            case Space.DEVICE, Role.STAGING if buffer.name in moved:
                names[Space.DEVICE].add(buffer.name)
            case _:
                pass
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
