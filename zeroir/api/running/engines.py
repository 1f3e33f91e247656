"""What a process needs to train as one rank besides its program: kernels and data."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from zeroir.errors import UserError
from zeroir.report.names import counted

if TYPE_CHECKING:
    from zeroir.api.running.run_options import RunOptions
    from zeroir.frontend.source.source import ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.data.training_data import TrainingData
    from zeroir.runtime.distributed.rendezvous import JobRank
    from zeroir.runtime.engine.opened_program import EngineSettings
    from zeroir.runtime.kernels.choice import KernelBackend


def lowered_again_note(program: Program, world_size: int) -> str | None:
    """Return a note if a program is lowered again for this world size; None if it was compiled for it."""
    compiled_for = program.mesh.world_size
    if compiled_for == world_size:
        return None
    return f"Compiled for {counted(compiled_for, 'rank')}, lowered again for {world_size}."


def open_data(source: ModelSource, job_rank: JobRank, seed: int) -> TrainingData:
    """Open this rank's batches: those of the source's ``batches``, or its example batch repeated."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData, repeated

    function = source.batches or repeated(source.batch)
    rank = RankOfData(rank=job_rank.rank, world_size=job_rank.world_size, seed=seed)
    return TrainingData(function, rank)


def settings_of_run(options: RunOptions) -> EngineSettings:
    """Return what the options of a run tell the engine."""
    from zeroir.runtime.engine.opened_program import EngineSettings

    return EngineSettings(
        kernels=kernel_backend(options.kernels),
        seed=options.seed,
        timeout=timedelta(seconds=options.timeout_s),
        cuda_graphs=options.cuda_graphs,
        self_check=options.self_check,
    )


def kernel_backend(name: str) -> KernelBackend:
    """Return the kernel backend of this name, or raise a UserError if there is none."""
    from zeroir.runtime.kernels.choice import KernelBackend

    try:
        return KernelBackend(name)
    except ValueError:
        raise UserError(
            f"There is no kernel backend '{name}': choose {' or '.join(KernelBackend)}."
        ) from None
