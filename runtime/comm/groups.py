"""One process group for each communicator, so that collectives of two communicators never wait in the same queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroir.ir.program import Program


def make_groups(
    program: Program,
    backend: str,
    timeout: timedelta,
    *,
    is_needed: Callable[[Sequence[int]], bool] = lambda _: True,
) -> dict[str, ProcessGroup]:
    """Create the groups of every communicator whose ranks need one; all ranks of the default group call this together.

    Returns:
        This rank's groups by the communicator's name.
    """
    rank = dist.get_rank()
    own: dict[str, ProcessGroup] = {}
    for comm in program.comms:
        for members in filter(is_needed, program.mesh.groups(comm.axis)):
            group = dist.new_group(list(members), timeout=timeout, backend=backend)
            if rank in members:
                own[comm.name] = group
    return own


def destroy_group(group: ProcessGroup) -> None:
    """Destroy a process group; ignore errors of a broken connection."""
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group(group)
