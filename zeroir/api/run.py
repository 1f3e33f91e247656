"""Run a compiled program: make its engine, train under torchrun, or start torchrun itself."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import traceback
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from zeroir.api.compiled import CompiledProgram, load_program
from zeroir.artifact import Artifact
from zeroir.artifact.outputs import TIMELINE, require_writable, write_whole
from zeroir.errors import (
    MEMORY_REMEDY,
    GraphWarning,
    InternalError,
    KernelWarning,
    ModelWarning,
    UserError,
    ZeroirError,
    is_out_of_memory,
)
from zeroir.report.names import counted, format_bytes

if TYPE_CHECKING:
    from zeroir.frontend.entry import ModelFile, ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.batch import Batch
    from zeroir.runtime.engine import Engine
    from zeroir.runtime.kernels.choice import KernelBackend
    from zeroir.runtime.rendezvous import JobRank


class ClosedOutputError(ZeroirError):
    """Nobody reads the losses any more (``zeroir run … | head``)."""

    exit_code = 128 + signal.SIGPIPE


def run_program(
    path: Path,
    *,
    steps: int,
    seed: int,
    log_every: int,
    model: str | None,
    allow_model_change: bool,
    as_json: bool,
    trace: Path | None = None,
    kernels: str = "eager",
    cuda_graphs: bool = False,
    self_check: bool = True,
) -> None:
    """Train for ``steps`` steps as the rank that torchrun made this process, or alone without torchrun.

    Rank 0 prints, and writes the recorded timeline of the last step to ``trace``. In a job of several ranks a failure
    is printed by the rank that met it and ends the process at once, since threads may be stuck in a collective with a
    lost peer.

    Raises:
        UserError: alone, or before the job is joined.
    """
    with watched_job():
        if trace is not None and os.environ.get("RANK", "0") == "0":
            require_writable(trace, TIMELINE)
        compiled = load_program(path)
        model_file = load_model(compiled, model=model, allow_model_change=allow_model_change)
        with joined_job() as place:
            _train(
                compiled,
                model_file,
                place,
                steps,
                seed,
                log_every,
                as_json,
                trace,
                kernels,
                cuda_graphs,
                self_check,
            )


@contextmanager
def watched_job() -> Iterator[None]:
    """A body in which a rank of a job ends where another rank falls silent, or the job's store is gone.

    Raises:
        UserError: where the environment does not say which rank this is, or the store cannot be reached.
    """
    from zeroir.runtime import heartbeat, rendezvous

    with heartbeat.watched(rendezvous.read_launch_environment(), _give_up):
        yield


@contextmanager
def joined_job() -> Iterator[JobRank]:
    """A body with a place in the job. In a job of several ranks a failure is said by the rank that met it, and ends it.

    Raises:
        UserError: alone.
    """
    from zeroir.runtime import rendezvous

    launch = rendezvous.read_launch_environment()
    try:
        yield rendezvous.join_job()
        rendezvous.leave_job()
    except (Exception, KeyboardInterrupt) as error:
        if launch.world_size == 1:
            raise
        _fail(error, launch.rank)


def _give_up(why: str) -> NoReturn:
    """Say why the job cannot go on, and stop."""
    from zeroir.runtime import train

    # Whoever failed first may be about to say so.
    train.give_way()
    _say(f"Error: {why}")
    train.abandon_job(UserError.exit_code)


def _fail(error: BaseException, rank: int) -> NoReturn:
    """Say once why this rank of a job stops, and stop."""
    from zeroir.runtime import train
    from zeroir.runtime.comm.job import PeerError

    match error:
        case ZeroirError():
            if isinstance(error, PeerError):
                train.give_way()
            where = "" if str(error).startswith("Rank ") else f" on rank {rank}"
            _say(f"Error{where}: {error}")
            train.abandon_job(error.exit_code)
        case KeyboardInterrupt():
            if rank != 0:
                # Ctrl-C reaches every rank, and one sentence is enough.
                train.give_way()
            _say("Interrupted." if rank == 0 else f"Rank {rank} was interrupted.")
            train.abandon_job(130)
        case _ if is_out_of_memory(error):
            _say(f"Error on rank {rank}: Memory ran out: {MEMORY_REMEDY}.")
            train.abandon_job(UserError.exit_code)
        case _:
            traceback.print_exception(error)
            _say(
                f"Error on rank {rank}: This is a defect of zeroir; please report it with the lines above."
            )
            train.abandon_job(70)


def _train(
    compiled: CompiledProgram,
    model_file: ModelFile,
    place: JobRank,
    steps: int,
    seed: int,
    log_every: int,
    as_json: bool,
    trace: Path | None,
    kernels: str,
    cuda_graphs: bool,
    self_check: bool,
) -> None:
    from zeroir.runtime import progress, train
    from zeroir.runtime.comm.job import PeerError

    try:
        compiled, note = fitted(compiled, place.world_size)
    except UserError as error:
        # The same on every rank, and one sentence is enough.
        if place.rank == 0:
            raise
        raise PeerError(str(error)) from error
    if place.rank == 0 and note:
        _say(note)
    if place.rank == 0 and (note := construction_note(compiled.program)):
        _say(note)
    with warnings_as_sentences():
        engine = open_engine(
            compiled,
            model_file,
            place,
            seed,
            kernels,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
        )
    if model_file.batches is None and place.rank == 0:
        _say(f"{model_file.path} has no batches(): training on batch() again and again.")
    batches = open_batches(model_file, place, seed)
    if trace is not None:
        engine.record(steps)
    reporter = progress.reporter(place.rank, steps, as_json=as_json, out=sys.stdout, err=sys.stderr)
    try:
        with warnings_as_sentences():
            train.train(engine, batches, steps=steps, reporter=reporter, log_every=log_every)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ClosedOutputError(
            "Training stopped, because what read its output went away: write to a file instead, or end it with Ctrl-C."
        ) from None
    except OSError as error:
        raise UserError(
            f"Training stopped, because something could not be written: {error.strerror}."
        ) from error
    finally:
        reporter.close()
    if trace is not None:
        _write_trace(trace, engine)
    engine.close()


def open_batches(model_file: ModelFile, place: JobRank, seed: int) -> Iterator[Batch]:
    """This rank's data: what the model file offers, or its example batch again and again.

    Raises:
        UserError: where the model file's ``batches`` fails.
    """
    from zeroir.runtime import train

    if model_file.batches is None:
        return train.repeat_batch(model_file.batch)
    try:
        return model_file.batches(place.rank, place.world_size, seed, 0)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise train.model_error("batches()", error) from error


def _write_trace(path: Path, engine: Engine) -> None:
    """Gather what every rank recorded; rank 0 writes it."""
    from zeroir.report.trace import chrome_trace

    ranks = engine.timelines()
    if ranks is None:
        return
    document = chrome_trace(engine.program, ranks, step=engine.step_count)
    write_whole(path, json.dumps(document, separators=(",", ":")).encode(), TIMELINE)
    _say(f"Wrote {path}, the timeline of step {engine.step_count}: open it at ui.perfetto.dev.")


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def make_engine(
    compiled: CompiledProgram,
    *,
    seed: int = 0,
    model: str | Path | None = None,
    allow_model_change: bool = False,
    kernels: str = "eager",
    cuda_graphs: bool = False,
    self_check: bool = True,
) -> Engine:
    """See ``CompiledProgram.engine``."""
    from zeroir.runtime import rendezvous

    model_file = load_model(compiled, model=model, allow_model_change=allow_model_change)
    place = rendezvous.join_job()
    compiled, _ = fitted(compiled, place.world_size)
    return open_engine(
        compiled,
        model_file,
        place,
        seed,
        kernels,
        cuda_graphs=cuda_graphs,
        self_check=self_check,
    )


def load_model(
    compiled: CompiledProgram,
    *,
    model: str | Path | None = None,
    allow_model_change: bool = False,
) -> ModelFile:
    """The model file that a program was compiled from, or ``model`` in its place; it runs once it is known.

    Raises:
        UserError: where it is gone, or it or a module that it imports is not the same any more and no one allowed that.
    """
    from zeroir.frontend.entry import read_model_file, run_model_file

    artifact = compiled.artifact
    path = find_model(compiled) if model is None else model
    has_factory = str(path).rpartition(":")[2].isidentifier() and not Path(path).exists()
    source = read_model_file(str(path) if has_factory else f"{path}:{artifact.model_factory}")
    changed = None if allow_model_change else _changed(source, artifact)
    if changed is not None:
        raise UserError(
            f"{changed} since the program was compiled from it: compile it again, or pass "
            "--allow-model-change if the change leaves the computation alone."
        )
    return run_model_file(source)


def _changed(source: ModelSource, artifact: Artifact) -> str | None:
    """What of a model file and the modules that it imports is not as it was, as the beginning of a sentence."""
    if source.sha256 != artifact.model_sha256:
        return f"{source.path} changed"
    if artifact.model_imports is None:
        return None
    known = dict(artifact.model_imports)
    found = source.imports(known)
    for name in sorted({*known, *found}):
        if name not in found:
            return f"The module {name}, which {source.path} imports, has gone"
        if name not in known:
            return f"The module {name}, which {source.path} imports, has come"
        if found[name] != known[name]:
            return f"The module {name}, which {source.path} imports, changed"
    return None


def find_model(compiled: CompiledProgram) -> Path:
    """Where the model file is: as it was named when compiled, from here or a folder above the program, or beside it.

    Of several that exist, the one with the right contents. A path that a program file brings along is followed only
    where it is relative and leads down, so that no such file chooses what is run.

    Raises:
        UserError: where there is none.
    """
    artifact, home = compiled.artifact, compiled.path
    named = Path(artifact.model_path)
    is_followed = home is None or not (named.is_absolute() or ".." in named.parts)
    places = [named] if is_followed else []
    if home is not None:
        if is_followed:
            places += [folder / named for folder in home.resolve().parents]
        places.append(home.parent / named.name)
    found = [place for place in places if place.is_file()]
    for place in found:
        if hashlib.sha256(place.read_bytes()).hexdigest() == artifact.model_sha256:
            return place
    if found:
        return found[0]
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
    """The program for this many ranks, lowered again if need be, and a line that says so.

    Raises:
        UserError: where its mesh has groups that so many ranks do not make.
    """
    compiled_for = compiled.program.mesh.world_size
    if compiled_for == world_size:
        return compiled, None
    note = f"Compiled for {counted(compiled_for, 'rank')}, lowered again for {world_size}."
    return compiled.for_world_size(world_size), note


def open_engine(
    compiled: CompiledProgram,
    model_file: ModelFile,
    place: JobRank,
    seed: int,
    kernels: str = "eager",
    *,
    cuda_graphs: bool = False,
    self_check: bool = False,
) -> Engine:
    """An initialised engine at this process's place in the job."""
    from zeroir.runtime.engine import Engine

    engine = Engine(
        compiled.program,
        device=place.device,
        seed=seed,
        kernels=kernel_backend(kernels),
        cuda_graphs=cuda_graphs,
        self_check=self_check,
    )
    engine.initialise(model_file.model, seed)
    return engine


_NOTABLE_BYTES = 1 << 30


def construction_note(program: Program) -> str | None:
    """What building the model takes of rank 0's host beside the engine, where it is worth a line."""
    numel = sum(flat.numel for flat in program.flats)
    if 4 * numel < _NOTABLE_BYTES:
        return None
    return (
        f"Rank 0 builds the model whole and hands it out: until then its host needs {format_bytes(4 * numel)} more, if "
        "the model is made in FP32."
    )


def kernel_backend(name: str) -> KernelBackend:
    """The kernel backend of that name; UserError where there is none."""
    from zeroir.runtime.kernels.choice import KernelBackend

    try:
        return KernelBackend(name)
    except ValueError:
        raise UserError(
            f"There are no kernels '{name}': choose {' or '.join(KernelBackend)}."
        ) from None


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Print our own warnings as one sentence each, without the line of code that they come from."""
    with warnings.catch_warnings():
        for ours in (KernelWarning, GraphWarning, ModelWarning):
            warnings.simplefilter("always", ours)
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, KernelWarning | GraphWarning | ModelWarning):
                _say(f"Warning: {message}")
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


_EXPLAINED = (UserError.exit_code, InternalError.exit_code, ClosedOutputError.exit_code, 130)
"""Exit codes of ranks that have said why."""


def launch(nproc: int, arguments: list[str]) -> int:
    """Run ``zeroir`` with these arguments on ``nproc`` local ranks under torchrun's agent; return their exit code.

    The exit code is that of the rank that failed first, or 0.
    """
    _require_loopback()
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
    # A rank that fails says why, and the agent is not to talk over it.
    logging.disable(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "zeroir", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            if failure.exitcode not in _EXPLAINED:
                _say(
                    f"Error: Rank {rank} ended with the exit code {failure.exitcode}, without a reason."
                )
            return failure.exitcode
        _say(f"Error: Rank {rank} was killed by {signal.Signals(-failure.exitcode).name}.")
        return 128 - failure.exitcode  # as a shell says it
    except SignalException as error:
        # The agent has passed the signal on and waited for the ranks, which say why they stopped.
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _require_loopback() -> None:
    """UserError where processes of this machine cannot reach each other, for which the agent would wait for ever."""
    try:
        with (
            socket.create_server(("localhost", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=10),
        ):
            return
    except OSError as error:
        raise UserError(
            f"The ranks of this machine cannot reach each other at localhost: {error.strerror or error}; bring its "
            "loopback up (`ip link set lo up`), and let /etc/hosts name it."
        ) from None
