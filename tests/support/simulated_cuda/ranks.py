"""The ranks of a job as threads, each with a device that is not there, which communicate by NCCL's code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.support.simulated_cuda.driver import SimulatedCuda
from tests.support.simulated_cuda.transport import Communicator
from zeroir.ir.program import Program
from zeroir.runtime.comm.nccl import NcclComm
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.kernels.choice import KernelBackend, open_kernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.state import initialise_flats
from zeroir.torch_ops.batches import Batch

PATIENCE_S = 120.0


class Rank:
    """One rank: its memory on its device, and what steps it."""

    def __init__(
        self, program: Program, rank: int, communicators: Mapping[str, Sequence[Communicator]]
    ) -> None:
        device = torch.device("cuda", rank)
        own = {
            name: communicator.of(rank)
            for name, of_axis in communicators.items()
            for communicator in of_axis
            if rank in communicator.members
        }
        self.memory = RankMemory(program, rank, device)
        ranks = LocalRanks(
            program=program,
            memories=[self.memory],
            comm=NcclComm(own),
            kernels=open_kernels(KernelBackend.EAGER, device),
        )
        self.streams = CudaStreams(program, device)
        self.executor = StepExecutor(ranks, self.streams)


def train_ranks(
    driver: SimulatedCuda,
    program: Program,
    values: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequence[Batch]]],
    *,
    rounds: bool = False,
) -> list[list[Tensor]]:
    """Train ``batches[step][rank][micro_step]`` on all ranks; return losses and persistent buffers of each rank.

    With ``rounds`` sums are rounded at each rank, as NCCL's are.

    Raises:
        Exception: what failed first on a rank.
    """
    communicators = {
        comm.name: [
            Communicator(driver, comm.name, members, rounds=rounds)
            for members in program.mesh.groups(comm.axis)
        ]
        for comm in program.comms
    }
    found: dict[int, list[Tensor]] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with driver.in_thread(rank), torch.no_grad():
                own = Rank(program, rank, communicators)
                initialise_flats(program, [own.memory], values)
                results = [own.executor.step([of_ranks[rank]])[0].loss for of_ranks in batches]
                own.executor.finish()
                kept = [own.memory.buffer(b.name) for b in program.buffers if b.is_persistent]
                found[rank] = [value.cpu() for value in (*results, *kept)]
                own.streams.close()
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failures.append(error)

    _in_threads(run, range(program.mesh.world_size))
    if failures:
        raise failures[0]
    return [found[rank] for rank in sorted(found)]


def _in_threads(run: Callable[[int], None], ranks: Sequence[int]) -> None:
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank does not end"
