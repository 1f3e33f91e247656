"""Run a compiled program: make its engine, train under torchrun, or start torchrun itself."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram, load_program
from zeroir.errors import UserError, ZeroirError

if TYPE_CHECKING:
    from zeroir.frontend.entry import ModelFile
    from zeroir.runtime.engine import Engine
    from zeroir.runtime.train import Place


def run_program(
    path: Path,
    *,
    steps: int,
    seed: int,
    log_every: int,
    allow_model_change: bool,
    as_json: bool,
) -> None:
    """Train for ``steps`` steps as the rank that torchrun made this process, or alone without torchrun.

    Rank 0 prints. In a job of several ranks a failure is printed by the rank that met it and ends the process at
    once, since threads may be stuck in a collective with a lost peer.

    Raises:
        UserError: alone, or before the job is joined.
    """
    from zeroir.runtime import train

    compiled = load_program(path)
    model_file = load_model(compiled, allow_model_change=allow_model_change)
    place = train.join_job()
    try:
        _train(compiled, model_file, place, steps, seed, log_every, as_json)
    except ZeroirError as error:
        if place.world_size == 1:
            raise
        _say(f"Error: {error}")
        train.abandon_job(error.exit_code)
    except KeyboardInterrupt:
        if place.world_size == 1:
            raise
        if place.rank == 0:
            _say("Interrupted.")
        train.abandon_job(130)


def _train(
    compiled: CompiledProgram,
    model_file: ModelFile,
    place: Place,
    steps: int,
    seed: int,
    log_every: int,
    as_json: bool,
) -> None:
    from zeroir.runtime import progress, train

    compiled, note = fitted(compiled, place.world_size)
    if place.rank == 0 and note:
        _say(note)
    engine = open_engine(compiled, model_file, place, seed)
    if model_file.batches is None:
        if place.rank == 0:
            _say(f"{model_file.path} has no batches(): training on batch() again and again.")
        batches = train.repeat_batch(model_file.batch)
    else:
        batches = model_file.batches(place.rank, place.world_size, seed, 0)
    reporter = progress.reporter(place.rank, steps, as_json=as_json, out=sys.stdout, err=sys.stderr)
    train.train(engine, batches, steps=steps, reporter=reporter, log_every=log_every)
    engine.close()
    train.leave_job()


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def make_engine(
    compiled: CompiledProgram, *, seed: int = 0, allow_model_change: bool = False
) -> Engine:
    """See ``CompiledProgram.engine``."""
    from zeroir.runtime import train

    model_file = load_model(compiled, allow_model_change=allow_model_change)
    place = train.join_job()
    compiled, _ = fitted(compiled, place.world_size)
    return open_engine(compiled, model_file, place, seed)


def load_model(compiled: CompiledProgram, *, allow_model_change: bool = False) -> ModelFile:
    """The model file that a program was compiled from.

    Raises:
        UserError: where it is gone, or is not the same any more and no one allowed that.
    """
    from zeroir.frontend.entry import load_model_file

    artifact = compiled.artifact
    model_file = load_model_file(f"{artifact.model_path}:{artifact.model_factory}")
    if model_file.sha256 != artifact.model_sha256 and not allow_model_change:
        raise UserError(
            f"{artifact.model_path} changed since the program was compiled from it: compile it again, or pass "
            "--allow-model-change if the change leaves the computation alone."
        )
    return model_file


def fitted(compiled: CompiledProgram, world_size: int) -> tuple[CompiledProgram, str | None]:
    """The program for this many ranks, lowered again if need be, and a line that says so."""
    compiled_for = compiled.program.mesh.world_size
    if compiled_for == world_size:
        return compiled, None
    note = f"Compiled for {compiled_for} ranks, lowered again for {world_size}."
    return compiled.for_world_size(world_size), note


def open_engine(
    compiled: CompiledProgram, model_file: ModelFile, place: Place, seed: int
) -> Engine:
    """An initialised engine at this process's place in the job."""
    from zeroir.runtime.engine import Engine

    engine = Engine(compiled.program, device=place.device, seed=seed)
    engine.initialise(model_file.model, seed)
    return engine


def launch(nproc: int, arguments: list[str]) -> int:
    """Run ``zeroir`` with these arguments on ``nproc`` local ranks under torchrun's agent; return their exit code.

    The exit code is that of the rank that failed first, or 0.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "zeroir", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as error:
        # The agent has passed the signal on and waited for the ranks, which say why they stopped.
        return 128 + error.sigval
    return 0
