"""Profiling: measure a machine by a program's own steps on all its ranks, so that simulations match them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zeroir.api.compiling import load_program
from zeroir.api.model_of_program import load_model
from zeroir.api.running.agreement import require_same_model
from zeroir.api.running.engines import kernel_backend, open_data
from zeroir.api.running.job import joined_job, watched_job
from zeroir.api.search.profile_options import ProfileOptions
from zeroir.api.sentences import warnings_as_sentences
from zeroir.artifact.outputs import MACHINE, write_whole
from zeroir.config.shapes import values_given
from zeroir.cost.host_profile import with_measured_disk, with_measured_host
from zeroir.cost.machine import Machine, load_machine, to_toml
from zeroir.cost.profile import measured_machine
from zeroir.cost.simulate import simulate
from zeroir.ir.host_rates import MeasuredDisk, MeasuredHost

if TYPE_CHECKING:
    from zeroir.runtime.engine.engine import Engine

Rates = TypeVar("Rates", MeasuredHost, MeasuredDisk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The result of a profile: the machine, the measured step time, and the step time that the machine predicts.

    ``host`` and ``disk`` are the rates of one rank. ``step_s`` is the median of the steps that were not recorded.
    ``noise`` is the difference between the medians of the odd and of the even rounds, as a fraction of ``step_s``; None
    with one round. ``at`` are the values of the program's dims in all batches.
    """

    machine: Machine
    rounds: int
    step_s: float
    noise: float | None
    predicted_s: float
    host: MeasuredHost
    disk: MeasuredDisk | None
    at: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """Return the profile without the machine's figures."""
        return {
            "machine": self.machine.name,
            "rounds": self.rounds,
            "at": dict(self.at),
            "step_seconds": self.step_s,
            "noise": self.noise,
            "predicted_step_seconds": self.predicted_s,
            "segments": len(self.machine.segments),
            "collectives": len(self.machine.collectives),
            "ops": len(self.machine.ops),
            "host": asdict(self.host),
            "disk": None if self.disk is None else asdict(self.disk),
        }


def profile_program(
    path: Path,
    output: Path,
    options: ProfileOptions,
    at: Mapping[str, int] | str | None = None,
) -> Profile | None:
    """Profile as the rank that torchrun made this process, or alone; rank 0 writes the machine and returns the profile.

    Properties that are not measured, such as the size of memory, are those of the machine of the ``options``. Batches
    have the sizes ``at``, such as ``length=2048``; other dims have their largest.

    In a job of several ranks a failure ends the process, as in ``run_program``.

    Raises:
        UserError: in a job of one rank, or before the job is joined.
    """
    with watched_job() as watch:
        base = load_machine(options.machine)
        compiled = load_program(path)
        values = values_given(compiled.program, at)
        source = load_model(
            compiled.artifact,
            compiled.path,
            model=options.model,
            allow_model_change=options.allow_model_change,
        )
        with joined_job(watch) as job_rank:
            from zeroir.runtime.data.sized_batches import sized
            from zeroir.runtime.disk.disk_rates import measure_disk
            from zeroir.runtime.engine.opened_program import EngineSettings
            from zeroir.runtime.execution.host_profile import measure_host
            from zeroir.runtime.execution.profile import record

            require_same_model(job_rank, source)
            compiled = compiled.specialise(world_size=job_rank.world_size)
            settings = EngineSettings(seed=options.seed, kernels=kernel_backend(options.kernels))
            with warnings_as_sentences():
                engine = compiled.open_engine(source, job_rank, settings)
            data = open_data(source, job_rank, options.seed)
            recording = record(
                engine,
                lambda step: sized(compiled.program, values, data.take(step)),
                rounds=options.rounds,
            )
            host = _averaged(measure_host(job_rank.device, partial(_meet, engine)), engine)
            disk = None
            if options.disk is not None:
                rates = measure_disk(options.disk, job_rank.rank, partial(_meet, engine))
                disk = _averaged(rates, engine)
            engine.close()
            if recording is None:
                return None
            base = with_measured_host(
                base,
                host,
                world_size=job_rank.world_size,
                memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            )
            if disk is not None:
                base = with_measured_disk(base, disk, world_size=job_rank.world_size)
            program = compiled.at(values).program
            measured = measured_machine(
                program,
                recording.steps,
                base,
                name=output.stem,
                workspaces={
                    plain.digest(): recording.workspaces[segment.digest()]
                    for segment, plain in zip(
                        compiled.program.segments, program.segments, strict=True
                    )
                    if segment.digest() in recording.workspaces
                },
            )
            predicted_s = simulate(program, measured).step_s
            write_whole(output, to_toml(measured).encode(), MACHINE)
    return Profile(
        machine=measured,
        rounds=options.rounds,
        step_s=recording.step_s,
        noise=recording.noise,
        predicted_s=predicted_s,
        host=host,
        disk=disk,
        at=values,
    )


def _meet(engine: Engine) -> None:
    """Synchronise all ranks."""
    engine.average(0.0)


def _averaged(rates: Rates, engine: Engine) -> Rates:
    """Return the means of the ranks' rates. Collective over all ranks."""
    return replace(rates, **{name: engine.average(rate) for name, rate in asdict(rates).items()})
