"""Run a compiled program: find its model file, make its engine, and train."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram, compile_source, load_program
from zeroir.api.job import ClosedOutputError, joined_job, watched_job
from zeroir.api.keywords import OffloadKeywords
from zeroir.api.outside_memory import (
    host_memory_bytes,
    local_ranks,
    outside_bytes,
    outside_note,
    require_disk_folder,
    require_host_memory,
)
from zeroir.api.run_checkpoints import held_folder, resume, saves_of, stopping
from zeroir.api.run_options import TENSORBOARDS, RunOptions
from zeroir.api.sentences import LOGGER, say, warnings_as_sentences
from zeroir.artifact import Artifact
from zeroir.artifact.outputs import TIMELINE, require_writable, write_whole
from zeroir.config import make_options
from zeroir.config.model_spec import Factory
from zeroir.errors import UserError
from zeroir.report.names import counted, format_bytes

if TYPE_CHECKING:
    from zeroir.frontend.entry import ModelText
    from zeroir.frontend.source import Model, ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.data.training_data import TrainingData
    from zeroir.runtime.engine import Engine
    from zeroir.runtime.evaluations import Evaluations
    from zeroir.runtime.kernels.choice import KernelBackend
    from zeroir.runtime.module_values import StateSource
    from zeroir.runtime.rendezvous import JobRank
    from zeroir.runtime.saves import Saves
    from zeroir.runtime.stop_signal import StopSignal
    from zeroir.runtime.training_state import TrainingState


def run_program(path: Path, options: RunOptions) -> None:
    """Train as the rank that torchrun made this process, or alone without torchrun.

    Rank 0 prints, and writes the recorded timeline of the last step. In a job of several ranks, a rank that fails
    prints why and ends its process at once, because its threads may be blocked in a collective with a lost peer.

    Raises:
        UserError: in a job of one rank, or before the job is joined.
    """
    trace = options.trace
    with watched_job() as watch:
        if os.environ.get("RANK", "0") == "0":
            require_outputs(options)
        compiled = load_program(path)
        source = load_model(
            compiled, model=options.model, allow_model_change=options.allow_model_change
        )
        with joined_job(watch) as job_rank, held_folder(options.save, job_rank.rank):
            with _same_on_all_ranks(job_rank):
                compiled = with_optimizer_bits(compiled, source, options.optimizer_bits)
            compiled = _fit_and_report(compiled, job_rank, options.offload)
            evaluations = _evaluations(compiled, source, job_rank, options)
            with _same_on_all_ranks(job_rank):
                compiled = _for_micro_steps(compiled, options)
                if options.check_finite:
                    compiled = _checkable(compiled)
            with warnings_as_sentences():
                engine = open_engine(
                    compiled,
                    source,
                    job_rank,
                    options.seed,
                    options.kernels,
                    cuda_graphs=options.cuda_graphs,
                    self_check=options.self_check,
                )
                if watch is not None:
                    watch.tell = engine.whereabouts
                training = _training(engine, source, job_rank, options)
                resume(training, options)
            if source.batches is None and job_rank.rank == 0:
                say(f"There is no batches(): training on {source.names.batch} again and again.")
            training.data.open()
            if trace is not None:
                engine.record(options.steps)
            with stopping() as stop:
                _train(
                    training,
                    evaluations,
                    saves_of(training, options.save),
                    stop,
                    options,
                    at_peak_s=_at_peak_s(compiled, job_rank, options.machine),
                )
            if trace is not None and engine.step_count == options.steps:
                _write_trace(trace, engine)
            engine.close()


def _training(
    engine: Engine, source: ModelSource, job_rank: JobRank, options: RunOptions
) -> TrainingState:
    from zeroir.runtime.training_state import TrainingState

    is_scheduled = "schedule" in engine.program.option
    return TrainingState(
        engine=engine,
        data=open_data(source, job_rank, options.seed),
        scheduler=engine.scheduler(options.steps) if is_scheduled else None,
        seed=options.seed,
    )


def with_optimizer_bits(
    compiled: CompiledProgram, source: ModelSource, bits: int | None
) -> CompiledProgram:
    """The program with states of so many bits; traced again where it has others, as it is with None.

    Raises:
        UserError: where its optimizer cannot have them.
    """
    if bits in (None, compiled.options.optimizer_bits):
        return compiled
    options = make_options({**compiled.as_requested.model_dump(), "optimizer_bits": bits})
    traced = compile_source(source, options, compiled.config)
    return replace(traced, path=compiled.path)


def _fit_and_report(
    compiled: CompiledProgram, job_rank: JobRank, offload: OffloadKeywords
) -> CompiledProgram:
    """The program for the job's world size, with what the run offloads; rank 0 prints notes on it."""
    with _same_on_all_ranks(job_rank):
        compiled, note = fitted(compiled, job_rank.world_size)
        compiled = compiled.with_offload(**offload)
        outside = outside_bytes(compiled.program)
        require_disk_folder(outside, compiled.artifact.offload_folder)
    if job_rank.rank == 0:
        notes = note, construction_note(compiled.program), outside_note(outside)
        for sentence in filter(None, notes):
            say(sentence)
    return compiled


def _for_micro_steps(compiled: CompiledProgram, options: RunOptions) -> CompiledProgram:
    """The program for the run's number and order of micro-steps.

    A program that runs whole steps unit by unit is lowered again for another number of them.
    """
    compiled_options = compiled.options
    micro_steps = options.micro_steps or compiled_options.micro_steps
    is_other_number = micro_steps != compiled_options.micro_steps
    if options.order is not None or (compiled_options.is_step_interleaved and is_other_number):
        order = compiled_options.order if options.order is None else options.order
        return compiled.in_order(order, micro_steps)
    group = compiled.program.interleaved
    if micro_steps % group:
        raise UserError(
            f"--micro-steps {micro_steps} is no multiple of {group}, but the program runs its micro-batches in groups "
            f"of {group} (--order {compiled_options.order}): name such a multiple, or another --order."
        )
    if micro_steps > 1 and not compiled.accumulates:
        return compiled.for_accumulation(micro_steps)
    return compiled


@contextmanager
def _same_on_all_ranks(job_rank: JobRank) -> Iterator[None]:
    """A body whose errors and warnings are the same on every rank: one sentence is enough, rank 0's."""
    from zeroir.runtime.comm.job import PeerError

    try:
        with warnings_as_sentences(is_silent=job_rank.rank != 0):
            yield
    except UserError as error:
        if job_rank.rank == 0:
            raise
        raise PeerError(str(error)) from error


def _checkable(compiled: CompiledProgram) -> CompiledProgram:
    """The program with all gradients there before the update.

    Raises:
        UserError: in fp16, where gradients that are not finite are a part of loss scaling.
    """
    if compiled.options.precision == "fp16":
        raise UserError(
            "--check-finite has no meaning in fp16, where steps with gradients that are not finite are skipped: leave "
            "it out."
        )
    return compiled.without_overlap()


def _train(
    training: TrainingState,
    evaluations: Evaluations | None,
    saves: Saves | None,
    stop: StopSignal,
    options: RunOptions,
    *,
    at_peak_s: float | None,
) -> None:
    from zeroir.runtime import progress, train

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
                micro_steps=options.micro_steps,
                evaluations=evaluations,
                saves=saves,
                stop=stop,
                at_peak_s=at_peak_s,
                check_finite=options.check_finite,
            )
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


def require_outputs(options: RunOptions) -> None:
    """Raise UserError where the run could not write its outputs or know its machine, before anything else happens."""
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
    """The seconds of the model's arithmetic in a micro-step at the peak of the rank's device, if that is known."""
    from zeroir.cost.arithmetic_at_peak import micro_step_at_peak_s
    from zeroir.cost.machine import load_machine, machine_of_device

    if machine is not None:
        return micro_step_at_peak_s(compiled.logical, load_machine(machine))
    if job_rank.device.type != "cuda":
        return None
    import torch

    known = machine_of_device(torch.cuda.get_device_name(job_rank.device))
    return None if known is None else micro_step_at_peak_s(compiled.logical, known)


def open_data(source: ModelSource, job_rank: JobRank, seed: int) -> TrainingData:
    """This rank's batches: those of the source's ``batches``, or its example batch again and again."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData, repeated

    function = source.batches or repeated(source.batch)
    rank = RankOfData(rank=job_rank.rank, world_size=job_rank.world_size, seed=seed)
    return TrainingData(function, rank)


def _evaluations(
    compiled: CompiledProgram,
    source: ModelSource,
    job_rank: JobRank,
    options: RunOptions,
) -> Evaluations | None:
    """The evaluations of a run, None without ``--eval-every``."""
    from zeroir.runtime.evaluations import Evaluations

    every, seed = options.eval_every, options.seed
    if every is None:
        return None
    eval_batches = source.eval_batches
    with _same_on_all_ranks(job_rank):
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


def source_for_engine(
    compiled: CompiledProgram, model: Model | None, *, allow_model_change: bool
) -> ModelSource:
    """The source whose values an engine takes: ``model``, or else what the program was compiled from.

    Raises:
        UserError: as ``load_model`` does.
    """
    from zeroir.frontend.in_hand import source_of

    if model is None and compiled.source is not None:
        return compiled.source
    if model is None or isinstance(model, str | Path):
        return load_model(compiled, model=model, allow_model_change=allow_model_change)
    return source_of(model, None, None, None)


def load_model(
    compiled: CompiledProgram,
    *,
    model: str | Path | None = None,
    allow_model_change: bool = False,
) -> ModelSource:
    """Execute the model file that a program was compiled from, or the file ``model``, and return its functions.

    Raises:
        UserError: where the file is missing, or where it or a module that it imports has changed and
            ``allow_model_change`` is False. Nothing is executed then.
    """
    from zeroir.frontend.entry import read_model_file, run_model_file

    artifact = compiled.artifact
    if not artifact.has_model_file:
        raise UserError(
            f"The program was compiled from {artifact.model_path}, not from a model file: load and run it in Python, "
            "with zeroir.load(path).engine(model=...)."
        )
    path = find_model(compiled) if model is None else model
    text = read_model_file(str(path), Factory.parse(artifact.model_factory))
    changed = None if allow_model_change else _changed(text, artifact)
    if changed is not None:
        raise UserError(
            f"{changed} since the program was compiled from it: compile it again, or pass "
            "--allow-model-change if the change leaves the computation alone."
        )
    return run_model_file(text)


def _changed(text: ModelText, artifact: Artifact) -> str | None:
    """The beginning of a sentence on a change of the model file or of a module that it imports; None without one."""
    if text.sha256 != artifact.model_sha256:
        return f"{text.path} changed"
    if artifact.model_imports is None:
        return None
    compiled = dict(artifact.model_imports)
    current = text.imports(compiled)
    for name in sorted({*compiled, *current}):
        if name not in current:
            return f"The module {name}, which {text.path} imports, was removed"
        if name not in compiled:
            return f"The module {name}, which {text.path} imports, was added"
        if current[name] != compiled[name]:
            return f"The module {name}, which {text.path} imports, changed"
    return None


def find_model(compiled: CompiledProgram) -> Path:
    """The path of the model file: the path at compilation, from here or from a folder above the program, or beside it.

    If several files exist, the one with the right contents is preferred. The path in a program file is followed only if
    it is relative and leads down, so that a program file cannot choose any file to execute.

    Raises:
        UserError: where no such file exists.
    """
    artifact, home = compiled.artifact, compiled.path
    named = Path(artifact.model_path)
    is_followed = home is None or not (named.is_absolute() or ".." in named.parts)
    candidates = [named] if is_followed else []
    if home is not None:
        if is_followed:
            candidates += [folder / named for folder in home.resolve().parents]
        candidates.append(home.parent / named.name)
    files = [candidate for candidate in candidates if candidate.is_file()]
    for file in files:
        if hashlib.sha256(file.read_bytes()).hexdigest() == artifact.model_sha256:
            return file
    if files:
        return files[0]
    if not is_followed:
        raise UserError(
            f"The program was compiled from {named}; a path that is absolute or leads up is not followed unless you "
            f"name it, and there is no {named.name} beside {home}: pass --model {named} if you trust that file."
        )
    beside = "" if home is None else f" nor beside {home}"
    raise UserError(
        f"The model file {named} that the program was compiled from is not here{beside}: "
        "say with --model where it is."
    )


def fitted(compiled: CompiledProgram, world_size: int) -> tuple[CompiledProgram, str | None]:
    """The program for this world size, lowered again if necessary, and a sentence that says so.

    Raises:
        UserError: where the groups of its mesh do not divide the world size.
    """
    compiled_for = compiled.program.mesh.world_size
    if compiled_for == world_size:
        return compiled, None
    note = f"Compiled for {counted(compiled_for, 'rank')}, lowered again for {world_size}."
    return compiled.for_world_size(world_size), note


def open_engine(
    compiled: CompiledProgram,
    source: ModelSource,
    job_rank: JobRank,
    seed: int,
    kernels: str = "eager",
    *,
    cuda_graphs: bool = False,
    self_check: bool = False,
    state: StateSource | None = None,
    keep_module: bool = False,
) -> Engine:
    """An initialised engine for this process's rank of the job; see ``Engine.initialise``."""
    from zeroir.frontend.meta_copy import deep_copy
    from zeroir.frontend.precision import apply_precision
    from zeroir.runtime.engine import Engine

    def accumulating() -> Program:
        if job_rank.rank == 0:
            LOGGER.info(
                "The program was compiled for steps of one batch: it is lowered again for steps of any number. With "
                "--micro-steps 2 it is so from the start."
            )
        return compiled.for_accumulation(2).program

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
        cuda_graphs=cuda_graphs,
        self_check=self_check,
        weight=source.weight,
        disk_folder=compiled.artifact.offload_folder,
        accumulating=None if compiled.accumulates else accumulating,
    )
    options = compiled.options
    engine.initialise(
        source.model() if source.is_in_hand else source.model,
        seed,
        state=state,
        keep_module=keep_module,
        deep_copy=deep_copy,
        adapt=partial(apply_precision, precision=options.precision, keep_fp32=options.keep_fp32),
    )
    return engine


_NOTABLE_BYTES = 1 << 30


def construction_note(program: Program) -> str | None:
    """A sentence on the host memory that rank 0 needs to build the model; None where it is below 1 GiB."""
    numel = sum(flat.numel for flat in program.flats)
    if 4 * numel < _NOTABLE_BYTES:
        return None
    return (
        f"Rank 0 builds the whole model and sends it to the other ranks; until then its host needs "
        f"{format_bytes(4 * numel)} more memory, if the model is in FP32."
    )


def kernel_backend(name: str) -> KernelBackend:
    """The kernel backend of this name; UserError where there is none."""
    from zeroir.runtime.kernels.choice import KernelBackend

    try:
        return KernelBackend(name)
    except ValueError:
        raise UserError(
            f"There is no kernel backend '{name}': choose {' or '.join(KernelBackend)}."
        ) from None
