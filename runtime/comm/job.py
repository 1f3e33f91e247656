"""This process as a rank of the job: its backend, and the check before step 1 that all ranks have the same program."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.text import print_program
from zeroir.runtime.comm.base import Comm, LostConnectionError
from zeroir.runtime.comm.collectives import all_gather_flat
from zeroir.runtime.comm.groups import make_groups
from zeroir.runtime.comm.local import LocalComm

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""Seconds that a rank waits for a rank that is alive but late; a dead rank is noticed at once."""


class Backend(StrEnum):
    """The transport of collectives: none (one rank), shared memory, shared memory and gloo, gloo, NCCL, or a fake."""

    LOCAL = "local"
    PEER_MEMORY = "peer-memory"
    PEER_MEMORY_AND_GLOO = "peer-memory and gloo"
    GLOO = "gloo"
    NCCL = "nccl"
    FAKE = "fake"


class PeerError(UserError):
    """Another rank failed and knows the reason; its message should come first."""


class LostPeersError(PeerError):
    """A collective failed because another rank stopped, hangs, or cannot be reached."""


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a backend's error means that another rank has ended or is late, rather than a wrong call."""
    # Only the text of gloo's errors distinguishes them: its transport includes the name of its source file.
    return isinstance(error, LostConnectionError | dist.DistError) or "/gloo/" in str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's view of the job.

    ``backend`` is that of the program's collectives; small messages to all ranks must be on ``device``.
    """

    rank: int
    backend: Backend
    comm: Comm
    is_alone: bool
    device: torch.device

    def average(self, value: float) -> float:
        """Return the mean of every rank's value, added in rank order."""
        rows = self.exchange([value])
        return sum(row[0] for row in rows) / len(rows)

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, in rank order; each rank passes the same number. All ranks call this together."""
        if self.is_alone:
            return [list(values)]
        rows = exchanged(torch.tensor(values, dtype=torch.float64), self.device)
        return [[float(value) for value in row] for row in rows.tolist()]

    def shared_lines(self, own: Sequence[str]) -> list[str]:
        """Return rank 0's texts, which have no line breaks, on every rank. All ranks call this together."""
        if self.is_alone:
            return list(own)
        # The last line break makes the message non-empty even without texts.
        lines = "".join(f"{text}\n" for text in own) + "\n"
        text = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
        sizes = exchanged(torch.tensor([text.numel()], dtype=torch.int64), self.device).view(-1)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: text.numel()] = text
        first = exchanged(padded, self.device)[0, : int(sizes[0])]
        return first.numpy().tobytes().decode().split("\n")[:-2]

    def gather(self, own: bytes) -> list[bytes] | None:
        """Return every rank's bytes, in rank order, on rank 0, and None on the others. All ranks call this together."""
        if self.is_alone:
            return [own]
        sizes = exchanged(torch.tensor([len(own)], dtype=torch.int64), self.device).view(-1)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        padded = padded.to(self.device)
        rows = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        with explained():
            dist.gather(padded, rows, dst=0)
        if rows is None:
            return None
        return [
            row[: int(size)].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)
        ]


def open_job(
    program: Program, backend: Backend | None, device: torch.device, timeout: timedelta
) -> Job:
    """Make this process a rank of the program's mesh; all ranks call this together.

    Without ``backend`` a single rank needs none, and CUDA uses NCCL. On CPUs the ranks of one machine read each other's
    memory; gloo connects ranks of several machines, and of a machine where processes may not read each other's memory.

    Raises:
        UserError: where the world size of the job differs from the program's, or the programs of two ranks differ.
    """
    world_size = program.mesh.world_size
    if backend is None and world_size == 1:
        backend = Backend.LOCAL
    if backend is Backend.LOCAL:
        if world_size != 1:
            raise UserError(
                f"The program is for {world_size} ranks, but this process is alone: start it with torchrun."
            )
        return Job(rank=0, backend=backend, comm=LocalComm(), is_alone=True, device=device)
    if not dist.is_initialized():
        raise UserError("There is no process group: start the job with torchrun.")
    if dist.get_world_size() != world_size:
        raise UserError(
            f"The program is for {world_size} ranks, but the job has {dist.get_world_size()}; "
            f"compile it with --world-size {dist.get_world_size()}."
        )
    backend, comm = _open_comm(program, backend, device, timeout)
    return Job(
        rank=dist.get_rank(),
        backend=backend,
        comm=comm,
        is_alone=backend is Backend.FAKE,
        device=device,
    )


def _open_comm(
    program: Program, backend: Backend | None, device: torch.device, timeout: timedelta
) -> tuple[Backend, Comm]:
    """Return the backend, chosen here where the caller names none, and its collectives."""
    if backend is Backend.FAKE:
        from zeroir.runtime.comm.nccl import NcclComm

        return backend, NcclComm.of_groups(make_groups(program, "fake", timeout))
    # Compare first: ranks with different programs would create different groups, and hang.
    require_same_program(program, device)
    if backend is Backend.NCCL or (backend is None and device.type == "cuda"):
        from zeroir.runtime.comm.nccl import NcclComm

        return Backend.NCCL, NcclComm.of_groups(make_groups(program, "nccl", timeout))
    if backend is not Backend.GLOO and device.type == "cpu" and sys.platform.startswith("linux"):
        from zeroir.runtime.comm.machines import open_machines

        exchange = partial(_exchange_bytes, device=device)
        is_one_needed = backend is Backend.PEER_MEMORY
        opened = open_machines(
            program, dist.get_rank(), exchange, timeout, is_one_needed=is_one_needed
        )
        if opened is not None:
            comm, machines = opened
            return _backend_of(machines), comm
    if backend is Backend.PEER_MEMORY:
        raise UserError(
            "The ranks cannot read each other's memory: they are on a GPU or on several hosts, or in a container "
            "that forbids it; use another backend."
        )
    from zeroir.runtime.comm.gloo import GlooComm

    return Backend.GLOO, GlooComm(make_groups(program, "gloo", timeout))


def _backend_of(machines: Sequence[Sequence[int]]) -> Backend:
    """Return the transport between ranks on CPUs, where ranks of one machine read each other's memory."""
    if len(machines) == 1:
        return Backend.PEER_MEMORY
    is_shared = any(len(ranks) > 1 for ranks in machines)
    return Backend.PEER_MEMORY_AND_GLOO if is_shared else Backend.GLOO


def digest(program: Program) -> str:
    """Return the SHA-256 of the program's canonical text."""
    return hashlib.sha256(print_program(program).encode()).hexdigest()


def require_same_program(program: Program, device: torch.device) -> None:
    """Compare the digest of this rank's program with those of all ranks of the default group.

    Raises:
        UserError: on every rank, where any two digests differ; the message shows both.
    """
    digests = [row.hex() for row in _exchange_bytes(bytes.fromhex(digest(program)), device)]
    for rank, rank_digest in enumerate(digests):
        if rank_digest != digests[0]:
            kind = UserError if dist.get_rank() == rank else PeerError
            raise kind(
                f"Rank {rank} has another program than rank 0 (digest {rank_digest[:16]}… against {digests[0][:16]}…): "
                "start every rank with the same file, or the same model and options; code that needs its rank asks "
                "torch.distributed.get_rank() for it in forward or in the loss."
            )


def hosts_of_ranks(device: torch.device) -> list[str]:
    """Return the host name of every rank of the default group, in rank order. All ranks call this together."""
    return exchanged_texts(socket.gethostname(), device)


def exchanged_texts(own: str, device: torch.device) -> list[str]:
    """Return every rank's text, in rank order. All ranks of the default group call this together."""
    encoded = own.encode()
    sizes = exchanged(torch.tensor([len(encoded)], dtype=torch.int64), device).view(-1).tolist()
    longest = max(1, *sizes)
    rows = _exchange_bytes(encoded.ljust(longest, b"\0"), device)
    return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]


def _exchange_bytes(own: bytes, device: torch.device) -> list[bytes]:
    """Return every rank's bytes, in rank order; each rank passes the same number."""
    rows = exchanged(torch.frombuffer(bytearray(own), dtype=torch.uint8), device)
    return [bytes(row.tolist()) for row in rows]


def exchanged(own: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return every rank's tensor, of the same length on each rank: one row per rank, on the CPU."""
    world = dist.group.WORLD
    assert world is not None
    rows = torch.empty(dist.get_world_size() * own.numel(), dtype=own.dtype, device=device)
    with explained():
        all_gather_flat(rows, own.to(device), world)
    return rows.view(dist.get_world_size(), -1).cpu()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Explain the loss of another rank while the block exchanges messages between steps."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostPeersError(
            f"Rank {dist.get_rank()} lost its peers between steps: another rank stopped or is stuck; "
            "look at the first rank that failed."
        ) from error
