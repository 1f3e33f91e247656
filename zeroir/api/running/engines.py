"""What a process needs to train as one rank: the program for the job's world size, its engine, and its data."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram
from zeroir.api.running.outside_memory import (
    host_memory_bytes,
    local_ranks,
    outside_bytes,
    require_host_memory,
)
from zeroir.api.sentences import LOGGER
from zeroir.errors import UserError
from zeroir.report.names import counted

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.data.training_data import TrainingData
    from zeroir.runtime.distributed.rendezvous import JobRank
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.kernels.choice import KernelBackend
    from zeroir.runtime.state.module_values import StateSource


def lowered_again_note(compiled: CompiledProgram, world_size: int) -> str | None:
    """Say that a program is lowered again for this world size; None where it was compiled for it."""
    compiled_for = compiled.program.mesh.world_size
    if compiled_for == world_size:
        return None
    return f"Compiled for {counted(compiled_for, 'rank')}, lowered again for {world_size}."


def open_engine(
    compiled: CompiledProgram,
    source: ModelSource,
    job_rank: JobRank,
    seed: int,
    kernels: str = "eager",
    *,
    timeout: timedelta | None = None,
    cuda_graphs: bool = False,
    self_check: bool = False,
    state: StateSource | None = None,
    keep_module: bool = False,
) -> Engine:
    """An initialised engine for this process's rank of the job; see ``Engine.initialise``."""
    from zeroir.frontend.capture.precision import apply_precision
    from zeroir.frontend.source.meta_copy import deep_copy
    from zeroir.runtime.comm.job import DEFAULT_TIMEOUT
    from zeroir.runtime.engine.engine import Engine

    def accumulating() -> Program:
        if job_rank.rank == 0:
            LOGGER.info(
                "The program was compiled for steps of one batch: it is lowered again for steps of any number. With "
                "--micro-steps 2 it is so from the start."
            )
        return compiled.specialise(micro_steps=2).program

    require_host_memory(
        outside_bytes(compiled.program),
        ranks=local_ranks(),
        memory_bytes=host_memory_bytes(),
    )
    engine = Engine(
        compiled.program,
        device=job_rank.device,
        seed=seed,
        kernels=kernel_backend(kernels),
        timeout=timeout or DEFAULT_TIMEOUT,
        cuda_graphs=cuda_graphs,
        self_check=self_check,
        weight=source.weight,
        disk_folder=compiled.artifact.offload_folder,
        accumulating=None if compiled.accumulates else accumulating,
    )
    precision = compiled.options.precision
    engine.initialise(
        source.model() if source.is_in_hand else source.model,
        seed,
        state=state,
        keep_module=keep_module,
        deep_copy=deep_copy,
        adapt=partial(apply_precision, precision=precision.dtype, keep_fp32=precision.keep_fp32),
    )
    return engine


def open_data(source: ModelSource, job_rank: JobRank, seed: int) -> TrainingData:
    """This rank's batches: those of the source's ``batches``, or its example batch again and again."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData, repeated

    function = source.batches or repeated(source.batch)
    rank = RankOfData(rank=job_rank.rank, world_size=job_rank.world_size, seed=seed)
    return TrainingData(function, rank)


def kernel_backend(name: str) -> KernelBackend:
    """The kernel backend of this name; UserError where there is none."""
    from zeroir.runtime.kernels.choice import KernelBackend

    try:
        return KernelBackend(name)
    except ValueError:
        raise UserError(
            f"There is no kernel backend '{name}': choose {' or '.join(KernelBackend)}."
        ) from None
