"""This process's place in the job: its rank, its backend, and what all ranks must agree on before step 1."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final, assert_never

import torch
import torch.distributed as dist

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.text import print_program
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.comm.collectives import all_gather_flat
from zeroir.runtime.comm.groups import make_groups
from zeroir.runtime.comm.local import LocalComm

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""How long a rank waits for one that is alive but late; one that is gone is noticed at once."""


class Backend(StrEnum):
    """Who carries collectives: nobody (one rank), gloo, NCCL, or a pretended world."""

    LOCAL = "local"
    GLOO = "gloo"
    NCCL = "nccl"
    FAKE = "fake"


class PeerError(UserError):
    """Another rank failed, and this one only learns of it: whoever knows why is to speak first."""


class LostPeersError(PeerError):
    """A collective failed because another rank stopped, is stuck, or cannot be reached."""


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a backend's error means that another rank is gone or late, and not that it was called wrongly."""
    # gloo says so only in the text: its transport names its own source file.
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's view of the job. ``device`` is where small messages to all ranks must be."""

    rank: int
    comm: Comm
    is_alone: bool
    device: torch.device

    def average(self, value: float) -> float:
        """The mean of every rank's value, added in rank order."""
        if self.is_alone:
            return value
        values = _exchange(torch.tensor([value], dtype=torch.float64), self.device)
        total = sum(float(one) for one in values.view(-1))
        return total / len(values)


def open_job(
    program: Program, backend: Backend | None, device: torch.device, timeout: timedelta
) -> Job:
    """Take this process's place among the ranks of the program's mesh; every rank calls this alike.

    Without a backend: none for one rank, NCCL on CUDA, else gloo.

    Raises:
        UserError: where the job has another world size, or another rank another program.
    """
    world_size = program.mesh.world_size
    if backend is None:
        on_device = Backend.NCCL if device.type == "cuda" else Backend.GLOO
        backend = Backend.LOCAL if world_size == 1 else on_device
    if backend is Backend.LOCAL:
        if world_size != 1:
            raise UserError(
                f"The program is for {world_size} ranks, but this process is alone: start it with torchrun."
            )
        return Job(rank=0, comm=LocalComm(), is_alone=True, device=device)
    if not dist.is_initialized():
        raise UserError("There is no process group: start the job with torchrun.")
    if dist.get_world_size() != world_size:
        raise UserError(
            f"The program is for {world_size} ranks, but the job has {dist.get_world_size()}; "
            f"compile it with --world-size {dist.get_world_size()}."
        )
    return Job(
        rank=dist.get_rank(),
        comm=_open_comm(program, backend, device, timeout),
        is_alone=backend is Backend.FAKE,
        device=device,
    )


def _open_comm(
    program: Program, backend: Backend, device: torch.device, timeout: timedelta
) -> Comm:
    match backend:
        case Backend.LOCAL:
            return LocalComm()
        case Backend.GLOO:
            from zeroir.runtime.comm.gloo import GlooComm

            # Before any group is made: ranks with other programs would make other groups, and hang.
            require_same_program(program, device)
            return GlooComm(make_groups(program, "gloo", timeout))
        case Backend.NCCL:
            from zeroir.runtime.comm.nccl import NcclComm

            require_same_program(program, device)
            return NcclComm(make_groups(program, "nccl", timeout))
        case Backend.FAKE:
            from zeroir.runtime.comm.fake import fake_comm

            return fake_comm(program)
        case _:
            assert_never(backend)


def digest(program: Program) -> str:
    """SHA-256 of the program's canonical text."""
    return hashlib.sha256(print_program(program).encode()).hexdigest()


def require_same_program(program: Program, device: torch.device) -> None:
    """Compare digests with every rank of the default group.

    Raises:
        UserError: on every rank, where any two differ; it shows both digests.
    """
    own = torch.frombuffer(bytearray.fromhex(digest(program)), dtype=torch.uint8)
    digests = [bytes(row.tolist()).hex() for row in _exchange(own, device)]
    for rank, other in enumerate(digests):
        if other != digests[0]:
            kind = UserError if dist.get_rank() == rank else PeerError
            raise kind(
                f"Rank {rank} has another program than rank 0 (digest {other[:16]}… against {digests[0][:16]}…): "
                "start every rank with the same file."
            )


def _exchange(own: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Every rank's tensor, one row per rank, on the CPU."""
    world = dist.group.WORLD
    assert world is not None
    rows = torch.empty(dist.get_world_size() * own.numel(), dtype=own.dtype, device=device)
    try:
        all_gather_flat(rows, own.to(device), world)
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostPeersError(
            f"Rank {dist.get_rank()} lost its peers between steps: another rank stopped or is stuck; "
            "look at the first rank that failed."
        ) from error
    return rows.view(dist.get_world_size(), -1).cpu()
