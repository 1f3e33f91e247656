"""The checkpoints of a run: the folder that it locks, the checkpoint that it resumes, and those that it saves."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zeroir.api.running.run_options import AUTO, NONE, RunOptions, SaveOptions
from zeroir.api.sentences import say, say_reason
from zeroir.checkpoint.folder import Best, CheckpointFolder, HeldFolder, Listed
from zeroir.config import options_of
from zeroir.errors import DamagedCheckpointError, UserError
from zeroir.report.names import counted

if TYPE_CHECKING:
    from zeroir.runtime.checkpoint.loading import LoadedState
    from zeroir.runtime.distributed.heartbeat import Heartbeat
    from zeroir.runtime.training.checkpoint_schedule import Saves
    from zeroir.runtime.training.stop_signal import StopSignal
    from zeroir.runtime.training.training_state import Resumed, TrainingState


@contextmanager
def held_folder(options: SaveOptions | None, rank: int) -> Iterator[HeldFolder | None]:
    """Lock the folder of checkpoints on rank 0 while the body runs, so that no other job saves there.

    Yields:
        the folder, or None on other ranks.

    Raises:
        UserError: if another job has it, or it cannot be written.
    """
    if options is None or rank != 0:
        yield None
        return
    with CheckpointFolder(root=options.folder).lock() as held:
        yield held


def saves_of(
    training: TrainingState, options: SaveOptions | None, held: HeldFolder | None
) -> Saves | None:
    """Return the saves of a run, None without ``--save``."""
    from zeroir.runtime.training.checkpoint_schedule import Retention, Saves

    if options is None:
        return None
    retention = None
    if options.keep is not None:
        best = None if options.keep_best is None else Best(metric=options.keep_best)
        retention = Retention(keep=options.keep, best=best)
    return Saves(
        training=training,
        root=options.folder,
        held=held,
        every=options.every,
        retention=retention,
    )


@contextmanager
def stopping(watch: Heartbeat | None) -> Iterator[StopSignal]:
    """Make SIGTERM end training after the current step while the body runs.

    Where the step cannot end because of a lost rank, ``watch`` finds that soon.
    """
    from zeroir.runtime.training.stop_signal import stop_signal

    hurry = (lambda: None) if watch is None else watch.hurry
    with stop_signal(_end_unfinished, hurry) as stop:
        yield stop


def _end_unfinished() -> NoReturn:
    """End this process, which received SIGTERM and cannot finish its step."""
    from zeroir.runtime.training import train

    say_reason(
        "Error: This rank was ended by SIGTERM within a step, because the step did not end in time."
    )
    train.abandon_job(128 + signal.SIGTERM)


def resume(training: TrainingState, options: RunOptions) -> None:
    """Load the checkpoint that ``--resume`` selects, if there is one. Collective over all ranks; rank 0 prints.

    Damaged checkpoints of a folder are skipped, and the previous one is used.

    Raises:
        UserError: if the checkpoint does not fit the program or the data, or none of several is complete.
    """
    rank = training.engine.rank
    # The folder may temporarily look different to each rank, so rank 0 decides.
    own = _candidates(options) if rank == 0 else ()
    paths = training.engine.job.shared_lines(own)
    for number, path in enumerate(paths, 1):
        try:
            loaded = training.engine.load(path)
        except UserError as error:
            # Only the ranks that read the damage know its kind; the others only know that the load failed.
            is_damaged = isinstance(error, DamagedCheckpointError)
            if len(paths) == 1 or not training.engine.average(float(is_damaged)):
                raise
            if number == len(paths):
                raise DamagedCheckpointError(
                    f"None of the {len(paths)} checkpoints beside '{path}' is whole: name another folder with --save "
                    f"to begin anew. The last one: {error}"
                ) from error
            if rank == 0:
                say(f"Warning: {error} The one before it is tried.")
            continue
        resumed = training.restore(loaded)
        if rank == 0:
            for sentence in _sentences(training, options, loaded, resumed):
                say(sentence)
        return
    training.begin()


def _candidates(options: RunOptions) -> Sequence[str]:
    """Return the paths of the checkpoints to try, in order.

    Raises:
        UserError: if training is to start anew, or from an earlier step, in a folder with checkpoints of another run: a
            later resume would find those.
    """
    from zeroir.runtime.distributed.rendezvous import is_restart

    saved = () if options.save is None else CheckpointFolder(root=options.save.folder).list()
    match options.resume:
        case "none":
            if saved and options.save is not None:
                raise UserError(
                    f"'{options.save.folder}' has checkpoints of an earlier run, and --resume {NONE} would mix them "
                    f"with those of a new one: name another folder with --save, or go on with --resume {AUTO}."
                )
            return ()
        case "auto":
            return [listed.path for listed in saved]
        case path:
            if saved and is_restart():
                return [listed.path for listed in saved]
            inside = CheckpointFolder(root=path).list()
            if saved and options.save is not None and not _is_same(path, saved[0].path, inside):
                raise UserError(
                    f"'{options.save.folder}' has checkpoints that --resume {path} would leave behind, the newest "
                    f"'{saved[0].path}', and a later resume would find them: name another folder with --save, or go on "
                    f"with --resume {AUTO}."
                )
            return [listed.path for listed in inside] or [path]


def _is_same(path: str, newest: str, inside: Sequence[Listed]) -> bool:
    """Return whether a path refers to the newest checkpoint of the folder to save in, or to this folder."""
    if "://" in path:
        return path.rstrip("/") == newest or any(listed.path == newest for listed in inside)
    resumed = Path(inside[0].path if inside else path)
    return resumed.resolve() == Path(newest).resolve()


def _sentences(
    training: TrainingState, options: RunOptions, loaded: LoadedState, resumed: Resumed
) -> Sequence[str]:
    manifest = loaded.manifest
    saved_by = counted(manifest.origin.world_size, "rank")
    sentences = [
        f"Resumed from {loaded.path}, saved by {saved_by} after {loaded.step} of {options.steps} steps."
    ]
    match resumed.resumption:
        case "new":
            sentences.append("It has no position in the data, which begins anew.")
        case "replay":
            sentences.append(
                f"batches() takes no start_step, so the {resumed.batches} batches that it had given were made again "
                "and skipped."
            )
        case "loader" | "start-step":
            pass
    schedule = options_of(training.engine.program).schedule
    if resumed.schedule not in (None, schedule):
        sentences.append(f"The schedule was {resumed.schedule}, and is {schedule} from now on.")
    is_counting = training.scheduler is not None and training.scheduler.needs_steps
    if is_counting and resumed.steps not in (None, options.steps):
        sentences.append(
            f"The schedule was for {resumed.steps} steps, and is for {options.steps} from now on."
        )
    return sentences
