"""How a process joins its job: what the environment says of it, the job's store, and the default process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist

from zeroir.errors import UserError
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT
from zeroir.runtime.orphans import end_with_agent

JOIN_TIMEOUT: Final = timedelta(seconds=240)
"""How long ranks wait for one that does not join them. An agent takes 30 s more to kill one that is frozen."""

_MOST_RANKS: Final = 65536
_REMEDY: Final = "start the job with torchrun or `zeroir run --nproc`, which set it"


class KeyValueStore(Protocol):
    """What is needed of torch's stores, whose types torch does not export."""

    def set(self, key: str, value: str, /) -> None:
        """Let every rank read the value."""

    def get(self, key: str, /) -> bytes:
        """The value; waits for one."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them have a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all of them have a value; DistStoreError where one has none within the timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRank:
    """Where torchrun put this process."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """What the environment says of this process's place.

    The job's store is at ``address`` and ``port``, which is None where this process is no rank of a job; ``is_host``
    where this process holds the store itself, because no agent of torchrun does.
    """

    rank: int = 0
    world_size: int = 1
    address: str = ""
    port: int | None = None
    is_host: bool = False


def read_launch_environment() -> LaunchEnvironment:
    """This process's place as torchrun's variables say it: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        UserError: where they are incomplete or contradict each other.
    """
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


def open_store(launch: LaunchEnvironment, purpose: str, timeout: timedelta) -> KeyValueStore:
    """A connection of its own to what the job's store holds for a purpose; the rank that is the host makes the store.

    Raises:
        UserError: where the store cannot be reached within the timeout.
    """
    assert launch.port is not None
    # What tells this start of the ranks from others that the store has seen.
    start = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    try:
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


def join_job(timeout: timedelta = DEFAULT_TIMEOUT, patience: timedelta = JOIN_TIMEOUT) -> JobRank:
    """Become a rank of the job that torchrun started, over NCCL on CUDA and gloo elsewhere; alone without torchrun.

    ``timeout`` bounds later collectives of the default group, ``patience`` how long the other ranks may take to come.
    Where the default group is there already, its rank is this process's.

    Raises:
        UserError: where the environment is wrong, the other ranks do not come or cannot be reached, or there are more
            ranks than GPUs on this machine.
    """
    if dist.is_initialized():
        return JobRank(rank=dist.get_rank(), world_size=dist.get_world_size(), device=_own_device())
    launch, device = read_launch_environment(), _own_device()
    if launch.port is not None:
        end_with_agent()
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # Ranks of one machine need no name for it, which some machines cannot resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = open_store(launch, "joined", patience)
        _await_others(launch, store, patience)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise _cannot_join(launch, error) from error
    return JobRank(rank=launch.rank, world_size=launch.world_size, device=device)


def leave_job() -> None:
    """Give up the default process group after a job that went well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_others(launch: LaunchEnvironment, store: KeyValueStore, patience: timedelta) -> None:
    """Return when every rank has come this far, so that who does not come can be named."""
    keys = [str(rank) for rank in range(launch.world_size)]
    try:
        store.set(keys[launch.rank], "")
        try:
            store.wait(keys, patience)
        except dist.DistStoreError:
            missing = next(key for key in keys if not store.check([key]))
            raise UserError(
                f"Rank {missing} has not joined the job within {patience.total_seconds():.0f} s: it was not started, "
                "it was stopped, or it cannot reach "
                f"{launch.address}:{launch.port}; look at what it printed."
            ) from None
    except RuntimeError as error:
        raise _cannot_join(launch, error) from error


def _cannot_join(launch: LaunchEnvironment, error: Exception) -> UserError:
    reason = " ".join(str(error).partition("\n")[0].split()).rstrip(".")
    return UserError(
        f"Rank {launch.rank} could not join the job at {launch.address}:{launch.port}: {reason}."
    )


def _own_device() -> torch.device:
    """This machine's GPU for this rank, made current; the CPU where there is none."""
    local_rank = _number("LOCAL_RANK", 0, _MOST_RANKS - 1, default=0)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # NCCL refuses two ranks on one GPU unless it is asked to allow them.
    if local_rank >= count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise UserError(
            f"Local rank {local_rank} has no GPU, because this machine shows {count}: start no more ranks than that."
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device
