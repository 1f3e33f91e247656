"""How a process joins its job: torchrun's environment variables, the job's store, and the default process group."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from zeroir.errors import UserError
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT
from zeroir.runtime.device.driver import driver
from zeroir.runtime.distributed.interfaces import interface_towards
from zeroir.runtime.distributed.parent_process import end_with_agent
from zeroir.runtime.distributed.rank_discovery import AbsentRankError, KeyValueStore, call_roll
from zeroir.runtime.distributed.slurm import become_rank_of_step

JOIN_TIMEOUT: Final = timedelta(seconds=240)
"""Seconds that ranks wait for a rank that does not join. An agent needs 30 s more to kill a frozen one."""

_NOTE_AFTER_S: Final = 30.0
"""Seconds after which a process logs what it is waiting for."""
_MOST_RANKS: Final = 65536
_REMEDY: Final = "start the job with torchrun or `zeroir run --nproc`, which set it"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRank:
    """This process as a rank of its job, and the device that it uses."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """This process's rank according to torchrun's environment variables.

    The job's store is at ``address`` and ``port``; ``port`` is None where this process does not belong to a job. With
    ``is_host`` this process itself hosts the store, because no torchrun agent does.
    """

    rank: int = 0
    world_size: int = 1
    address: str = ""
    port: int | None = None
    is_host: bool = False


def read_launch_environment() -> LaunchEnvironment:
    """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets; a task of srun first sets them itself.

    Raises:
        UserError: where they are incomplete or contradictory.
    """
    become_rank_of_step(os.environ)
    if "RANK" not in os.environ:
        if _number("WORLD_SIZE", 1, _MOST_RANKS, default=1) > 1:
            raise UserError(f"WORLD_SIZE is set, but RANK is not: {_REMEDY}, or unset WORLD_SIZE.")
        return LaunchEnvironment()
    world_size = _number("WORLD_SIZE", 1, _MOST_RANKS)
    rank = _number("RANK", 0, _MOST_RANKS - 1)
    if rank >= world_size:
        raise UserError(
            f"RANK is {rank}, but the job has {world_size} ranks (WORLD_SIZE), which count from 0: "
            f"{_REMEDY}."
        )
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise UserError(f"RANK is set, but MASTER_ADDR is not: {_REMEDY}.")
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        address=address,
        port=_number("MASTER_PORT", 1, 65535),
        is_host=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _number(name: str, least: int, most: int, *, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise UserError(f"RANK is set, but {name} is not: {_REMEDY}.")
        return default
    if text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most:
        return int(text)
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    raise UserError(f"{name} is '{shown}', but must be a number from {least} to {most}: {_REMEDY}.")


def is_restart() -> bool:
    """Return whether torchrun has restarted the ranks of this job after it lost some."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def open_store(launch: LaunchEnvironment, purpose: str, timeout: timedelta) -> KeyValueStore:
    """Return a new connection to this purpose's part of the job's store, which the host rank creates.

    Raises:
        UserError: where the store cannot be reached within the timeout.
    """
    assert launch.port is not None
    # torchrun restarts a job with the same store, so the keys include the restart.
    start = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    try:
        with _noting_a_long_wait(launch, timeout):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                launch.address,
                launch.port,
                is_master=launch.is_host,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timeout,
            )
    except RuntimeError as error:
        raise _cannot_join(launch, error) from error
    shared: KeyValueStore = dist.PrefixStore(f"zeroir/{purpose}/{start}", store)  # type: ignore[attr-defined]
    return shared


@contextmanager
def _noting_a_long_wait(launch: LaunchEnvironment, timeout: timedelta) -> Iterator[None]:
    """Log a note, once per machine, where the block takes long to connect to the job's store."""

    def note() -> None:
        try:
            socket.getaddrinfo(launch.address, launch.port)
            reason = "no process listens there, or the network does not lead to it"
        except OSError:
            reason = f"this machine knows no host {launch.address}"
        logging.getLogger("zeroir").info(
            "Rank %d cannot reach the job at %s:%d yet (%s); it tries for %.0f s.",
            launch.rank,
            launch.address,
            launch.port,
            reason,
            timeout.total_seconds(),
        )

    timer = threading.Timer(_NOTE_AFTER_S, note)
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join_job(timeout: timedelta = DEFAULT_TIMEOUT, patience: timedelta = JOIN_TIMEOUT) -> JobRank:
    """Join the job that torchrun started, with NCCL on CUDA and gloo elsewhere; without torchrun, a job of one rank.

    ``timeout`` bounds later collectives of the default group, ``patience`` the wait for the other ranks to join. An
    existing default group is reused.

    Raises:
        UserError: where the environment is wrong, the other ranks do not join or cannot be reached, or this machine has
            fewer GPUs than ranks.
    """
    if dist.is_initialized():
        return JobRank(rank=dist.get_rank(), world_size=dist.get_world_size(), device=_own_device())
    launch, device = read_launch_environment(), _own_device()
    if launch.port is not None:
        end_with_agent()
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # Some machines cannot resolve their own name, and ranks of one machine do not need it.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif device.type != "cuda" and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Gloo listens at the address of the machine's own name, which is often a loopback address.
            interface = interface_towards(launch.address, launch.port)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
        store = open_store(launch, "joined", patience)
        store = _called(launch, store, patience)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=cast("Any", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise _cannot_join(launch, error) from error
    return JobRank(rank=launch.rank, world_size=launch.world_size, device=device)


def leave_job() -> None:
    """Destroy the default process group at the end of a successful job."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _called(launch: LaunchEnvironment, store: KeyValueStore, patience: timedelta) -> KeyValueStore:
    """Wait until every rank has reached this point; return a part of the store for this attempt of the job alone.

    Raises:
        UserError: where a rank does not reach it, or the store is lost.
    """
    try:
        job = call_roll(store, launch.rank, launch.world_size, patience)
    except AbsentRankError as error:
        raise UserError(
            f"Rank {error.rank} has not joined the job within {patience.total_seconds():.0f} s: it was not started, "
            "it was stopped, or it cannot reach "
            f"{launch.address}:{launch.port}; look at what it printed."
        ) from None
    except RuntimeError as error:
        raise _cannot_join(launch, error) from error
    own: KeyValueStore = dist.PrefixStore(job, cast("Any", store))  # type: ignore[attr-defined]
    return own


def _cannot_join(launch: LaunchEnvironment, error: Exception) -> UserError:
    reason = " ".join(str(error).partition("\n")[0].split()).rstrip(".")
    if launch.is_host and errno.errorcode[errno.EADDRINUSE] in reason:
        return UserError(
            f"Another process uses port {launch.port} of this machine, where rank 0 keeps the job's store: choose "
            "another MASTER_PORT, or `--master-port` of torchrun."
        )
    if "connectFullMesh" in reason:
        return UserError(
            f"Rank {launch.rank} has reached the job at {launch.address}:{launch.port}, but not the other ranks "
            f"({reason}): set GLOO_SOCKET_IFNAME on every machine to the interface that leads to the others."
        )
    return UserError(
        f"Rank {launch.rank} could not join the job at {launch.address}:{launch.port}: {reason}."
    )


def _own_device() -> torch.device:
    """Return the GPU of this rank, and make it current; the CPU where there is no GPU."""
    local_rank = _number("LOCAL_RANK", 0, _MOST_RANKS - 1, default=0)
    if not driver().is_available():
        return torch.device("cpu")
    count = driver().device_count()
    # NCCL refuses two ranks on one GPU unless this variable allows it.
    if local_rank >= count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise UserError(
            f"Local rank {local_rank} has no GPU, because this machine shows {count}: start at most as many ranks here."
        )
    device = torch.device("cuda", local_rank % count)
    driver().set_device(device)
    return device
