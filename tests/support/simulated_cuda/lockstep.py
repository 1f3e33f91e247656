"""All ranks of a program on one device that is not there, by the streams, events and memory of CUDA runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.support.simulated_cuda.driver import SimulatedCuda
from tests.support.simulated_cuda.tensors import DeviceTensor
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.memory.placement import Placement, places_to_run
from zeroir.runtime.comm.lockstep import LockstepComm
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.choice import KernelBackend, open_kernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.training.micro_batch_weights import WeightFunction


class DeviceMemory(RankMemory):
    """The memory of a rank, where a stream that frees memory of the host overwrites it when its turn comes."""

    def __init__(
        self,
        driver: SimulatedCuda,
        program: Program,
        rank: int,
        *,
        placed: Mapping[Space, Placement],
        disk_folder: Path | None,
    ) -> None:
        self._driver = driver
        super().__init__(
            program,
            rank,
            torch.device("cuda", 0),
            is_poisoned=True,
            placed=placed,
            disk_folder=disk_folder,
        )

    def _poison(self, name: str) -> None:
        if self.is_on_disk(name) or isinstance(self._tensor(name), DeviceTensor):
            super()._poison(name)
        else:
            self._driver.in_turn(lambda: super(DeviceMemory, self)._poison(name))


class OnDevice(Lockstep):
    """The ranks of a program as ``Lockstep`` has them, issued to the streams of a device as an engine does."""

    def __init__(
        self,
        driver: SimulatedCuda,
        program: Program,
        *,
        weight: WeightFunction | None = None,
        disk_folder: Path | None = None,
        streams: type[CudaStreams] = CudaStreams,
    ) -> None:
        device = torch.device("cuda", 0)
        self.program = program
        placed = places_to_run(program)
        self._memories = [
            DeviceMemory(driver, program, rank, placed=placed, disk_folder=disk_folder)
            for rank in range(program.mesh.world_size)
        ]
        self._local_ranks = LocalRanks(
            program=program,
            memories=self._memories,
            comm=LockstepComm(program),
            kernels=open_kernels(KernelBackend.EAGER, device),
        )
        self.streams = streams(program, device)
        self._executor = StepExecutor(self._local_ranks, self.streams, weight=weight)
