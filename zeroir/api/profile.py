"""Measure a machine by a program's own steps on all its ranks; the simulation of the program then takes as long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram, load_program
from zeroir.api.job import joined_job, watched_job
from zeroir.api.run import fitted, load_model, open_batches, open_engine
from zeroir.api.sentences import warnings_as_sentences
from zeroir.artifact.outputs import MACHINE, write_whole
from zeroir.cost.machine import Machine, load_machine, to_toml
from zeroir.cost.profile import measured_machine
from zeroir.cost.simulate import simulate

if TYPE_CHECKING:
    from zeroir.runtime.rendezvous import JobRank

ROUNDS = 20
"""The default number of rounds of a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The result of a profile: the machine, the measured step time, and the step time that the machine predicts.

    ``step_s`` is the median of the steps that were not recorded. ``noise`` is the difference between the medians of the
    odd and of the even rounds, as a fraction of ``step_s``; None with one round.
    """

    machine: Machine
    rounds: int
    step_s: float
    noise: float | None
    predicted_s: float

    def to_json(self) -> dict[str, object]:
        """The profile without the machine's figures."""
        return {
            "machine": self.machine.name,
            "rounds": self.rounds,
            "step_seconds": self.step_s,
            "noise": self.noise,
            "predicted_step_seconds": self.predicted_s,
            "segments": len(self.machine.segments),
            "collectives": len(self.machine.collectives),
            "ops": len(self.machine.ops),
        }


def profile_program(
    path: Path,
    *,
    output: Path,
    machine: str = "cpu-local",
    rounds: int = ROUNDS,
    seed: int = 0,
    model: str | None = None,
    allow_model_change: bool = False,
    kernels: str = "eager",
) -> Profile | None:
    """Profile as the rank that torchrun made this process, or alone; rank 0 writes the machine and returns the profile.

    Properties that are not measured, such as the size of memory, are those of ``machine``. In a job of several ranks a
    failure ends the process, as in ``run_program``.

    Raises:
        UserError: in a job of one rank, or before the job is joined.
    """
    with watched_job():
        base = load_machine(machine)
        compiled = load_program(path)
        load_model(compiled, model=model, allow_model_change=allow_model_change)
        with joined_job() as job_rank:
            result = _profile(
                compiled,
                job_rank,
                base,
                output.stem,
                rounds,
                seed,
                model,
                allow_model_change,
                kernels,
            )
            if result is not None:
                write_whole(output, to_toml(result.machine).encode(), MACHINE)
    return result


def _profile(
    compiled: CompiledProgram,
    job_rank: JobRank,
    base: Machine,
    name: str,
    rounds: int,
    seed: int,
    model: str | None,
    allow_model_change: bool,
    kernels: str,
) -> Profile | None:
    from zeroir.runtime import profile

    model_file = load_model(compiled, model=model, allow_model_change=allow_model_change)
    compiled, _ = fitted(compiled, job_rank.world_size)
    with warnings_as_sentences():
        engine = open_engine(compiled, model_file, job_rank, seed, kernels)
    recording = profile.record(engine, open_batches(model_file, job_rank, seed), rounds=rounds)
    engine.close()
    if recording is None:
        return None
    measured = measured_machine(
        compiled.program,
        recording.steps,
        base,
        name=name,
        workspaces=recording.workspaces,
    )
    return Profile(
        machine=measured,
        rounds=rounds,
        step_s=recording.step_s,
        noise=recording.noise,
        predicted_s=simulate(compiled.program, measured).step_s,
    )
