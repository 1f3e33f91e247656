"""A job of one or several ranks: launch it on this machine, join it, and end it when a rank fails."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from zeroir.api.sentences import notes_as_sentences, say, say_reason
from zeroir.errors import (
    MEMORY_REMEDY,
    InternalError,
    UserError,
    ZeroirError,
    explain_path,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from zeroir.runtime.distributed.heartbeat import Heartbeat
    from zeroir.runtime.distributed.rendezvous import JobRank


class ClosedOutputError(ZeroirError):
    """The reader of the losses has closed the pipe (``zeroir run … | head``)."""

    exit_code = 128 + signal.SIGPIPE


@contextmanager
def watched_job(timeout: timedelta | None = None) -> Iterator[Heartbeat | None]:
    """End this rank if another rank or the job's store stops responding, within a fifth of the timeout.

    In a job of several ranks, a rank whose input is wrong prints so and ends, unless another one has printed the same.

    Raises:
        UserError: if the environment does not define this rank, or the store cannot be reached; in a job of one rank,
            also those of the body.
    """
    from zeroir.runtime.distributed import heartbeat, rendezvous

    timing = None if timeout is None else heartbeat.HeartbeatTiming.within(timeout)
    environment = rendezvous.read_launch_environment()
    with notes_as_sentences(), heartbeat.watched(environment, _give_up, timing) as watch:
        try:
            yield watch
        except ZeroirError as error:
            if watch is None:
                raise
            _fail(error, environment.rank, watch)


@contextmanager
def joined_job(watch: Heartbeat | None, timeout: timedelta | None = None) -> Iterator[JobRank]:
    """Join the job. In a job of several ranks, the rank that fails prints why and ends.

    A rank that lost its peers also prints which of them is behind, according to its heartbeat.

    Raises:
        UserError: in a job of one rank.
    """
    from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, hosts_of_ranks
    from zeroir.runtime.distributed import rendezvous
    from zeroir.runtime.training.users_code import naming_lost_workers

    environment = rendezvous.read_launch_environment()
    try:
        with naming_lost_workers():
            job_rank = rendezvous.join_job(timeout or DEFAULT_TIMEOUT)
            if watch is not None:
                watch.hosts = hosts_of_ranks(job_rank.device)
            yield job_rank
        rendezvous.leave_job()
    except (Exception, KeyboardInterrupt) as error:
        if environment.world_size == 1:
            raise
        _fail(error, environment.rank, watch)


def is_rank_of_job(nproc: int | None) -> bool:
    """Return whether torchrun or srun started this process as a rank of a job.

    A task of srun gets torchrun's environment variables.

    Raises:
        UserError: if ``nproc`` asks for ranks of this machine, but srun has started several.
    """
    from zeroir.runtime.distributed.slurm import become_rank_of_step

    if "RANK" in os.environ:
        return True
    become_rank_of_step(os.environ)
    if nproc is not None and "RANK" in os.environ:
        raise UserError(
            f"srun has started {os.environ['WORLD_SIZE']} tasks, and --nproc would start more in each of them: leave "
            "--nproc out."
        )
    return "RANK" in os.environ


def _give_up(why: str) -> NoReturn:
    """Print why the job cannot continue, and end the process."""
    from zeroir.runtime.training import train

    # Let the rank that failed first print why.
    train.wait_for_first_failure()
    say_reason(f"Error: {why}")
    train.abandon_job(UserError.exit_code)


def _fail(error: BaseException, rank: int, watch: Heartbeat | None) -> NoReturn:
    """Print why this rank of a job stops, unless another rank has printed the same, and end the process."""
    from zeroir.runtime.comm.job import LostPeersError, PeerError
    from zeroir.runtime.distributed.heartbeat import NOTICED_S
    from zeroir.runtime.training import train

    exit_code = UserError.exit_code
    is_defect = False
    behind: str | None = None
    match error:
        case ZeroirError():
            if isinstance(error, PeerError):
                train.wait_for_first_failure(NOTICED_S)
            if isinstance(error, LostPeersError) and watch is not None:
                behind = watch.ranks_behind()
            sentence, exit_code = str(error), error.exit_code
        case KeyboardInterrupt():
            if rank != 0:
                # Ctrl-C reaches every rank, and one message is enough: rank 0's.
                train.wait_for_first_failure()
            say("Interrupted." if rank == 0 else f"Rank {rank} was interrupted.")
            train.abandon_job(130)
        case _ if is_out_of_memory(error):
            sentence = f"Memory ran out: {MEMORY_REMEDY}."
        case _ if (explained := explain_path(error)) is not None:
            sentence = explained
        case _:
            sentence, exit_code = repr(error), InternalError.exit_code
            is_defect = True
    if watch is not None and not watch.is_first_with(sentence):
        train.wait_for_first_failure()
    if is_defect:
        traceback.print_exception(error)
        sentence = "This is a defect of zeroir; please report it with the lines above."
    where = "" if sentence.startswith("Rank ") else f" on rank {rank}"
    say_reason(f"Error{where}: {sentence}" + ("" if behind is None else f" {behind}"))
    train.abandon_job(exit_code)


_EXPLAINED_CODES = (UserError.exit_code, InternalError.exit_code, ClosedOutputError.exit_code, 130)
"""Exit codes of ranks that have printed why they stopped."""


def launch(nproc: int, arguments: list[str]) -> int:
    """Run ``zeroir`` with these arguments on ``nproc`` local ranks under torchrun's agent.

    Returns:
        the exit code of the rank that failed first, or 0.
    """
    _require_loopback()
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # A rank that fails prints why; the agent's own messages would hide that.
    logging.disable(logging.CRITICAL)
    try:
        with TemporaryDirectory(prefix="zeroir-", ignore_cleanup_errors=True) as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, sys.executable)("-m", "zeroir", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            if failure.exitcode not in _EXPLAINED_CODES:
                say(
                    f"Error: Rank {rank} ended with the exit code {failure.exitcode}, without a reason."
                )
            return failure.exitcode
        say(f"Error: Rank {rank} was killed by {signal.Signals(-failure.exitcode).name}.")
        return 128 - failure.exitcode  # as in a shell
    except SignalException as error:
        # The agent has forwarded the signal and waited for the ranks, which print why they stopped.
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _require_loopback() -> None:
    """Raise a UserError if processes of this machine cannot connect, since the agent would wait forever."""
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
