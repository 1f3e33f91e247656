"""The run of a compiled program: find its model file, make its engine, and train."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import load_program
from zeroir.api.model_of_program import load_model
from zeroir.api.running.agreement import require_same_model, require_same_options
from zeroir.api.running.engines import open_data, settings_of_run
from zeroir.api.running.job import ClosedOutputError, joined_job, watched_job
from zeroir.api.running.run_checkpoints import held_folder, resume, saves_of, stopping
from zeroir.api.running.run_lowering import (
    fitted_to_job,
    same_on_all_ranks,
    with_optimizer_bits,
)
from zeroir.api.running.run_options import TENSORBOARDS, RunOptions
from zeroir.api.sentences import say, warnings_as_sentences
from zeroir.artifact.outputs import TIMELINE, require_writable, write_whole
from zeroir.config import options_of
from zeroir.errors import UserError
from zeroir.report.names import counted

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.runtime.distributed.rendezvous import JobRank
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.training.checkpoint_schedule import Saves
    from zeroir.runtime.training.evaluations import Evaluations
    from zeroir.runtime.training.stop_signal import StopSignal
    from zeroir.runtime.training.training_state import TrainingState


def run_program(
    path: Path, options: RunOptions, changes: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Train as the rank that torchrun made this process, or alone without torchrun.

    ``changes`` are options of the compilation, by flat name, that replace the program's own.

    Rank 0 prints, and writes the recorded timeline of the last step. In a job of several ranks, a rank that fails
    prints why and ends its process at once, because its threads may be blocked in a collective with a lost peer.

    Raises:
        UserError: in a job of one rank, or before the job is joined.
    """
    from zeroir.frontend.source.entry import importing_from

    trace, timeout = options.trace, timedelta(seconds=options.timeout_s)
    with watched_job(timeout) as watch:
        if os.environ.get("RANK", "0") == "0":
            require_outputs(options)
        compiled = load_program(path)
        source = load_model(
            compiled.artifact,
            compiled.path,
            model=options.model,
            allow_model_change=options.allow_model_change,
        )
        with (
            importing_from(source),
            joined_job(watch, timeout) as job_rank,
            held_folder(options.save, job_rank.rank) as held,
        ):
            require_same_options(job_rank, options, changes)
            require_same_model(job_rank, source)
            with same_on_all_ranks(job_rank):
                compiled = with_optimizer_bits(compiled, source, changes)
            compiled = fitted_to_job(compiled, job_rank, options, changes)
            with warnings_as_sentences():
                compiled = compiled.for_device(source, job_rank)
            evaluations = _evaluations(compiled, source, job_rank, options)
            with warnings_as_sentences():
                engine = compiled.open_engine(
                    source,
                    job_rank,
                    settings_of_run(options),
                    compile_again=True,
                )
                if watch is not None:
                    watch.tell = engine.position
                    if job_rank.rank == 0:
                        _say_machines(watch.hosts, engine)
                training = _training(engine, source, job_rank, options)
                resume(training, options)
            if source.batches is None and job_rank.rank == 0:
                say(f"There is no batches(): training on {source.names.batch} again and again.")
            training.data.open()
            if options.skip_other_sizes:
                training.data.takes = engine.takes
            if trace is not None:
                engine.record(options.steps)
            with stopping(watch) as stop:
                _train(
                    training,
                    evaluations,
                    saves_of(training, options.save, held),
                    stop,
                    options,
                    changes,
                    at_peak_s=_at_peak_s(compiled, job_rank, options.machine),
                )
            if trace is not None and engine.step_count == options.steps:
                _write_trace(trace, engine)
            engine.close()


def _say_machines(hosts: Sequence[str], engine: Engine) -> None:
    """Print which ranks are on which machine, and how they communicate, if there are several machines."""
    from zeroir.runtime.distributed.rank_position import ranks_by_host

    if len(set(hosts)) > 1:
        say(f"Machines: {ranks_by_host(hosts)}; they communicate over {engine.job.backend}.")


def _training(
    engine: Engine, source: ModelSource, job_rank: JobRank, options: RunOptions
) -> TrainingState:
    from zeroir.runtime.training.training_state import TrainingState

    is_scheduled = options_of(engine.program).schedule is not None
    return TrainingState(
        engine=engine,
        data=open_data(source, job_rank, options.seed),
        scheduler=engine.scheduler(options.steps) if is_scheduled else None,
        seed=options.seed,
    )


def _train(
    training: TrainingState,
    evaluations: Evaluations | None,
    saves: Saves | None,
    stop: StopSignal,
    options: RunOptions,
    changes: Mapping[str, object],
    *,
    at_peak_s: float | None,
) -> None:
    from zeroir.runtime.training import progress, train

    engine = training.engine
    if engine.step_count >= options.steps and engine.rank == 0:
        say("There is no step left: ask for more --steps.")
    try:
        with (
            progress.reporter(
                engine.rank,
                options.steps,
                steps_done=engine.step_count,
                as_json=options.as_json,
                out=sys.stdout,
                err=sys.stderr,
                log=options.log,
                tensorboard=options.tensorboard,
            ) as report,
            warnings_as_sentences(),
        ):
            train.train(
                training,
                steps=options.steps,
                report=report,
                log_every=options.log_every,
                micro_steps=_micro_steps(changes),
                evaluations=evaluations,
                saves=saves,
                stop=stop,
                at_peak_s=at_peak_s,
                check_finite=options.check_finite,
            )
        left_out = training.data.left_out
        if left_out:
            batches = counted(left_out, "batch", "batches")
            say(f"Rank {engine.rank} left out {batches} of sizes that the program does not take.")
        if engine.step_count < options.steps and engine.rank == 0:
            say(f"Stopped by SIGTERM after {engine.step_count} of {options.steps} steps.")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ClosedOutputError(
            "Training stopped, because the reader of its output closed it: write to a file instead, or end "
            "training with Ctrl-C."
        ) from None
    except OSError as error:
        raise UserError(
            f"Training stopped, because its output could not be written: {error.strerror}."
        ) from error


def _micro_steps(changes: Mapping[str, object]) -> int | None:
    """Return the number of micro-steps that the run requests; None for that of the program."""
    count = changes.get("micro_steps")
    return count if isinstance(count, int) else None


def require_outputs(options: RunOptions) -> None:
    """Check that the run can write its outputs and knows its machine, before anything else happens."""
    if options.trace is not None:
        require_writable(options.trace, TIMELINE)
    if options.log is not None:
        try:
            options.log.open("a").close()
        except OSError as error:
            raise UserError(
                f"'{options.log}' cannot be written: {error.strerror}. Name a file in a folder that you may write to."
            ) from None
    if options.tensorboard is not None:
        if not any(map(find_spec, TENSORBOARDS)):
            raise UserError(
                "--tensorboard needs the package tensorboard, which is not installed: "
                "pip install 'zeroir[tensorboard]'."
            )
        try:
            options.tensorboard.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"'{options.tensorboard}' cannot be a folder for TensorBoard: {error.strerror}. Name another one."
            ) from None
    if options.machine is not None:
        from zeroir.cost.machine import load_machine

        load_machine(options.machine)


def _at_peak_s(compiled: CompiledProgram, job_rank: JobRank, machine: str | None) -> float | None:
    """Return the seconds of a micro-step's arithmetic at the peak of the rank's device, if that is known."""
    from zeroir.cost.arithmetic_at_peak import micro_step_at_peak_s
    from zeroir.cost.machine import load_machine, machine_of_device

    if machine is not None:
        return micro_step_at_peak_s(compiled.logical, load_machine(machine))
    if job_rank.device.type != "cuda":
        return None
    from zeroir.runtime.device.driver import driver

    known = machine_of_device(driver().name(job_rank.device))
    return None if known is None else micro_step_at_peak_s(compiled.logical, known)


def _evaluations(
    compiled: CompiledProgram,
    source: ModelSource,
    job_rank: JobRank,
    options: RunOptions,
) -> Evaluations | None:
    """Return the evaluations of a run, None without ``--eval-every``."""
    from zeroir.runtime.training.evaluations import Evaluations

    every, seed = options.eval_every, options.seed
    if every is None:
        return None
    eval_batches = source.eval_batches
    with same_on_all_ranks(job_rank):
        compiled.require_evaluation()
        if eval_batches is None:
            raise UserError(
                f"--eval-every needs a function eval_batches(rank, world_size, seed) beside {source.names.batch}, "
                "which yields the batches of one evaluation."
            )
    return Evaluations(
        every=every, batches=lambda: eval_batches(job_rank.rank, job_rank.world_size, seed)
    )


def _write_trace(path: Path, engine: Engine) -> None:
    """Gather the timelines of all ranks; rank 0 writes them."""
    from zeroir.report.trace import chrome_trace

    ranks = engine.timelines()
    if ranks is None:
        return
    document = chrome_trace(engine.program, ranks, step=engine.step_count)
    write_whole(path, json.dumps(document, separators=(",", ":")).encode(), TIMELINE)
    say(f"Wrote {path}, the timeline of step {engine.step_count}: open it at ui.perfetto.dev.")
