"""A program ready to run on one rank: its memory, compiled kernels, streams and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zeroir.errors import ZeroirError
from zeroir.ir.program import Program
from zeroir.ir.sizes import maximum, minimum
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, Backend, Job
from zeroir.runtime.eight_bit.compiled_rounding import open_rounding
from zeroir.runtime.execution.anomalies import Anomalies
from zeroir.runtime.execution.batch import Shape
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.streams import Streams, ThreadStreams
from zeroir.runtime.execution.trace import HostClock, StreamClock
from zeroir.runtime.kernels.choice import KernelBackend, open_kernels
from zeroir.runtime.kernels.self_check import check_kernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state import state as state_of_buffers
from zeroir.runtime.training.micro_batch_weights import WeightFunction

if TYPE_CHECKING:
    from zeroir.runtime.execution.cuda_graphs import SectionGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is told that does not depend on its program.

    With ``cuda_graphs`` sections are launched as CUDA graphs where possible. With ``self_check`` every distinct kernel
    is first compared with its operators. ``weight`` returns the weight of a batch where the program takes weights.
    Buffers on disk are in an unnamed file in ``disk_folder``, by default in the folder for temporary files; nothing
    remains of it when the process ends.
    """

    backend: Backend | None = None
    kernels: KernelBackend = KernelBackend.EAGER
    seed: int = 0
    timeout: timedelta = DEFAULT_TIMEOUT
    cuda_graphs: bool = False
    self_check: bool = False
    weight: WeightFunction | None = None
    disk_folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedProgram:
    """Everything that runs a program on this process's device. ``graphs`` is None where ops are issued one by one."""

    memory: RankMemory
    executor: StepExecutor
    graphs: SectionGraphs | None

    def close(self, job: Job) -> None:
        """Stop the streams and destroy the process groups, once the device has done all submitted work.

        ``Engine.close`` describes what happens after a failure.
        """
        is_stuck = self.memory.device.type == "cuda" and self.executor.has_failed
        if is_stuck and not job.is_alone:
            self.executor.close()
            return
        self.stop()
        job.comm.close()

    def stop(self) -> None:
        """Stop the streams, once the device has done all submitted work."""
        with suppress(ZeroirError):
            self.executor.finish()
        if self.graphs is not None:
            self.graphs.close()
        self.executor.close()


def open_program(
    program: Program,
    job: Job,
    device: torch.device,
    settings: EngineSettings,
    kept: RankMemory | None = None,
    anomalies: Anomalies | None = None,
) -> OpenedProgram:
    """Create everything that runs a program, with the contents of the memory ``kept`` of the previous one.

    With ``anomalies``, which looks at values, ops are issued one by one.
    """
    memory = RankMemory(
        program, job.rank, device, disk_folder=settings.disk_folder, is_deferred=True
    )
    local_ranks = LocalRanks(
        program=program,
        memories=[memory],
        comm=job.comm,
        kernels=open_kernels(settings.kernels, device),
        rounding=open_rounding(program, device),
        anomalies=anomalies,
    )
    local_ranks.compile()
    if settings.self_check:
        for shape in _checked_shapes(program, settings.kernels):
            check_kernels(local_ranks.at(shape), settings.kernels)
    if kept is not None:  # only now, because the self-check overwrites the buffers
        state_of_buffers.take_over(program, memory, kept)
    has_graphs = settings.cuda_graphs and anomalies is None
    streams, graphs = _open_streams(program, memory, job, cuda_graphs=has_graphs)
    executor = StepExecutor(
        local_ranks,
        streams,
        seed=settings.seed,
        run_section=None if graphs is None else graphs.run,
        weight=settings.weight,
    )
    return OpenedProgram(memory=memory, executor=executor, graphs=graphs)


def _checked_shapes(program: Program, kernels: KernelBackend) -> Sequence[Shape]:
    """Return the values of dims with which kernels are checked: small ones that differ.

    A kernel that is compiled for all values is also checked with the smallest and the largest ones.
    """
    small = tuple(
        min(max(dim.minimum, 2 + index), dim.maximum) for index, dim in enumerate(program.dims)
    )
    if kernels is KernelBackend.EAGER:
        return [small]
    ends = [tuple(end(dim) for dim in program.dims) for end in (minimum, maximum)]
    return list(dict.fromkeys([small, *ends]))


def reason_without_graphs(program: Program, device: torch.device) -> str | None:
    """Return why no section of a program can be a CUDA graph, if there is a reason."""
    if device.type != "cuda":
        return f"There are no CUDA graphs on the device {device}"
    if program.dims:
        return "A CUDA graph is for one shape, and the program is for many"
    return None


def _open_streams(
    program: Program, memory: RankMemory, job: Job, *, cuda_graphs: bool
) -> tuple[Streams, SectionGraphs | None]:
    if memory.device.type != "cuda":
        return ThreadStreams(), None
    from zeroir.runtime.execution.cuda import CudaStreams

    streams = CudaStreams(program, memory.device)
    if not cuda_graphs or reason_without_graphs(program, memory.device) is not None:
        return streams, None
    from zeroir.runtime.execution.cuda_graphs import SectionGraphs

    return streams, SectionGraphs(program, streams, memory, job)


def open_clock(program: Program, device: torch.device) -> StreamClock:
    """Return the clock for recording ops of the device's streams."""
    if device.type != "cuda":
        return HostClock()
    from zeroir.runtime.execution.cuda import CudaClock

    return CudaClock(program, device)
