"""One process group per communicator, so that the collectives of two communicators never queue behind each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroir.ir.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """This rank's process group of every communicator, by the communicator's name."""

    by_comm: Mapping[str, ProcessGroup]

    def close(self) -> None:
        """Destroy the groups; a broken connection is no error here."""
        for group in self.by_comm.values():
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)


def make_groups(program: Program, backend: str, timeout: timedelta) -> Groups:
    """Create the groups of every communicator; all ranks of the default group call this together."""
    rank = dist.get_rank()
    own: dict[str, ProcessGroup] = {}
    for comm in program.comms:
        for members in program.mesh.groups(comm.axis):
            group = dist.new_group(list(members), timeout=timeout, backend=backend)
            if rank in members:
                own[comm.name] = group
    return Groups(by_comm=own)
