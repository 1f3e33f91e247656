"""One rank that tries the collectives of a backend: ``python -m tests.runtime.comm_workers SCENARIO``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.runtime.support import join
from zeroir.errors import UserError
from zeroir.ir.mesh import Axis, Communicator, Mesh
from zeroir.ir.ops import Reduction
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import CollectiveTensors, Comm, TensorPair
from zeroir.runtime.comm.job import Backend, is_lost_connection, open_job
from zeroir.runtime.comm.lockstep import LockstepComm

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)

CALLS: dict[str, Callable[[Comm, CollectiveTensors], None]] = {
    "all_gather": lambda comm, tensors: comm.all_gather(tensors),
    "reduce_scatter": lambda comm, tensors: comm.reduce_scatter(tensors, Reduction.SUM),
    "reduce_scatter_max": lambda comm, tensors: comm.reduce_scatter(tensors, Reduction.MAX),
    "all_reduce": lambda comm, tensors: comm.all_reduce(tensors, Reduction.SUM),
    "all_reduce_max": lambda comm, tensors: comm.all_reduce(tensors, Reduction.MAX),
    "broadcast": lambda comm, tensors: comm.broadcast(tensors, 1),
}


def mesh_program(axes: dict[str, int]) -> Program:
    """Nothing but a mesh, and a communicator along each of its axes."""
    return Program(
        mesh=Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items())),
        comms=tuple(Communicator(name=f"along_{name}", axis=name) for name in axes),
    )


@dataclass(frozen=True)
class Case:
    """One collective with random elements, the same on every rank that makes it."""

    call: str
    dtype: torch.dtype
    wire_dtype: torch.dtype | None
    numels: tuple[int, ...]
    """Of every pair: the elements of a rank's part, or of the whole where that is not cut."""
    in_place: bool

    def pairs(self, size: int, at: int) -> list[TensorPair]:
        """The pairs of the rank at a coordinate."""
        generator = torch.Generator().manual_seed(at)
        return [self._piece(size, at, numel, generator) for numel in self.numels]

    def _piece(self, size: int, at: int, numel: int, generator: torch.Generator) -> TensorPair:
        own = slice(at * numel, (at + 1) * numel)
        kind = self.call.removesuffix("_max")
        is_cut = kind in ("all_gather", "reduce_scatter")
        whole = torch.randn(size * numel if is_cut else numel, generator=generator)
        # Of very different sizes, so that the order of additions shows.
        whole = (whole * 10 ** (4 * whole.cos())).to(self.dtype)
        match kind:
            case "all_gather":
                destination = whole if self.in_place else torch.zeros_like(whole)
                return TensorPair(source=whole[own], destination=destination)
            case "reduce_scatter":
                destination = whole[own] if self.in_place else torch.zeros(numel, dtype=self.dtype)
                return TensorPair(source=whole, destination=destination)
            case _:
                destination = whole if self.in_place else torch.zeros_like(whole)
                return TensorPair(source=whole, destination=destination)


def cases() -> Iterator[Case]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    for call in CALLS:
        for dtype, wire_dtype in ((f32, None), (f32, bf16), (bf16, None), (bf16, f32), (f16, None)):
            for numels in ((7,), (1, 1500, 3)):
                for in_place in (False, True):
                    yield Case(call, dtype, wire_dtype, numels, in_place)
        # More than one chunk of what is read at a time, and several dtypes in one call.
        yield Case(call, f32, None, (280_003,), in_place=True)
        yield Case(call, f32, bf16, (280_003,), in_place=False)
        yield Case(call, torch.int64, None, (7,), in_place=False)
        if call in ("all_gather", "broadcast"):
            # What only moves may have floats that torch's backends do not send.
            yield Case(call, torch.float8_e4m3fn, None, (7, 1500), in_place=False)


def equal(axes: dict[str, int], backends: list[Backend | None], every: int = 1) -> None:
    """Every collective gives the bits of the reference semantics, on every rank."""
    program = mesh_program(axes)
    jobs = [open_job(program, backend, CPU, TIMEOUT) for backend in backends]
    print(*[job.backend for job in jobs])
    reference = LockstepComm(program)
    for comm in program.comms:
        groups = program.mesh.groups(comm.axis)
        place = {rank: (len(group), group.index(rank)) for group in groups for rank in group}
        for case in islice(cases(), None, None, every):

            def tensors(ranks: list[int], case: Case) -> CollectiveTensors:
                return CollectiveTensors(
                    comm=comm.name,  # noqa: B023
                    pairs=[case.pairs(*place[rank]) for rank in ranks],  # noqa: B023
                    staging=[None for _ in ranks],
                    wire_dtype=case.wire_dtype,
                )

            expected = tensors(list(range(WORLD_SIZE)), case)
            CALLS[case.call](reference, expected)
            for job in jobs:
                found = tensors([RANK], case)
                CALLS[case.call](job.comm, found)
                for one, other in zip(found.pairs[0], expected.pairs[RANK], strict=True):
                    assert has_bits_of(one.destination, other.destination), (job.backend, case)
    if list(axes) == ["dp"]:
        gather_many(jobs[0].comm)
    for job in jobs:
        job.comm.close()


def gather_many(comm: Comm) -> None:
    """More pairs than the addresses of which one message between ranks has room for."""
    sources = [torch.full((2,), float(RANK * 10_000 + at)) for at in range(9000)]
    pairs = [TensorPair(source=s, destination=torch.zeros(2 * WORLD_SIZE)) for s in sources]
    comm.all_gather(CollectiveTensors(comm="along_dp", pairs=[pairs], staging=[None]))
    for at, pair in enumerate(pairs):
        expected = [float(rank * 10_000 + at) for rank in range(WORLD_SIZE) for _ in range(2)]
        assert pair.destination.tolist() == expected


def has_bits_of(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gather(comm: Comm, numel: int) -> None:
    pair = TensorPair(source=torch.ones(numel), destination=torch.zeros(numel * WORLD_SIZE))
    comm.all_gather(CollectiveTensors(comm="along_dp", pairs=[[pair]], staging=[None]))
    assert pair.destination.eq(1).all()


def mismatch(what: str) -> None:
    """The last rank is elsewhere than the others, who all say where."""
    comm = open_job(mesh_program({"dp": WORLD_SIZE}), Backend.PEER_MEMORY, CPU, TIMEOUT).comm
    gather(comm, 4)
    is_odd = RANK == WORLD_SIZE - 1
    numel = 5 if is_odd and what == "size" else 4
    call = CALLS["broadcast" if is_odd and what == "call" else "all_gather"]
    pair = TensorPair(source=torch.ones(numel), destination=torch.ones(numel * WORLD_SIZE))
    tensors = CollectiveTensors(comm="along_dp", pairs=[[pair]], staging=[None])
    with pytest.raises(
        RuntimeError, match=r"'along_dp' rank . carries out #2 .*, but this rank carries out #2 "
    ):
        call(comm, tensors)
    dist.barrier()


def death() -> None:
    """Rank 1 is killed, and all others notice in the collective that they are in."""
    comm = open_job(mesh_program({"dp": WORLD_SIZE}), Backend.PEER_MEMORY, CPU, TIMEOUT).comm
    gather(comm, 4)
    if RANK == 1:
        time.sleep(0.5)  # the others are asleep by then
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        gather(comm, 4)
    assert is_lost_connection(caught.value), caught.value
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
    os._exit(0)


def machines(text: str) -> None:
    """Ranks on several machines, as it seems: each has the letter of its machine.

    Within a machine they read each other's memory, across they use gloo, with the same bits.
    """
    program = mesh_program({"dp": WORLD_SIZE})
    host = text[RANK].encode() * 32
    with patch("zeroir.runtime.comm.peers._host", lambda: host):
        with pytest.raises(UserError, match="cannot read each other's memory"):
            open_job(program, Backend.PEER_MEMORY, CPU, TIMEOUT)
        equal({"dp": WORLD_SIZE}, [None, Backend.GLOO], every=3)
        if WORLD_SIZE == 4:
            equal({"replicate": 2, "shard": 2}, [None], every=9)


def main() -> None:
    scenario, *args = sys.argv[1:]
    join()
    match scenario:
        case "equal":
            equal({"dp": WORLD_SIZE}, [None, Backend.GLOO], *map(int, args))
        case "equal-on-mesh":
            equal({"replicate": 2, "shard": WORLD_SIZE // 2}, [None], every=5)
        case "mismatch":
            mismatch(*args)
        case "death":
            death()
        case "machines":
            machines(*args)
        case _:
            raise AssertionError(scenario)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
