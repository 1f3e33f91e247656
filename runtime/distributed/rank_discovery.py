"""The ranks of a job find one another in its store, which may contain keys of earlier attempts of the job.

torchrun restarts a job with the same store, and even with the same attempt number when machines came or went. So a key
alone does not show whether a rank of this attempt wrote it: a rank that read the address of a process that has ended
would wait in vain. Each rank therefore writes a token of its own, and rank 0 answers each with the job's token.
"""

from __future__ import annotations

import logging
import time
import uuid
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

from zeroir.errors import UserError

_POLL_S: Final = 0.02
_NOTE_AFTER_S: Final = 30.0
"""Seconds after which rank 0 says which rank it is waiting for."""


class KeyValueStore(Protocol):
    """The methods of torch's stores that zeroir uses; torch does not export their types."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value that every rank can read."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value and return it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return its value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys have a value; raise DistStoreError where one has none within the timeout."""


class AbsentRankError(UserError):
    """A rank did not answer in time; ``rank`` is the first such rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Rank {rank} is absent.")
        self.rank = rank


def call_roll(store: KeyValueStore, rank: int, world_size: int, patience: timedelta) -> str:
    """Wait until every rank of this attempt has called this; return a new token, equal on all of them.

    Raises:
        AbsentRankError: where a rank does not call it within ``patience``.
    """
    deadline = time.monotonic() + patience.total_seconds()
    if rank == 0:
        job = uuid.uuid4().hex
        _answer_all(store, job, world_size, deadline)
        store.set(f"all/{job}", "")
        return job
    own = uuid.uuid4().hex
    store.set(f"rank/{rank}", own)
    if not _awaited(store, f"answer/{own}", deadline):
        raise AbsentRankError(0)
    job = store.get(f"answer/{own}").decode()
    store.set(f"present/{job}/{rank}", "")
    if not _awaited(store, f"all/{job}", deadline):
        raise AbsentRankError(
            next(r for r in range(1, world_size) if not store.check([f"present/{job}/{r}"]))
        )
    return job


def _answer_all(store: KeyValueStore, job: str, world_size: int, deadline: float) -> None:
    """Answer every token of every other rank, on rank 0, until each has read its answer."""
    answered: dict[int, bytes] = {}
    note_s = time.monotonic() + _NOTE_AFTER_S
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"rank/{rank}"]):
                token = store.get(f"rank/{rank}")
                if answered.get(rank) != token:
                    store.set(f"answer/{token.decode()}", job)
                    answered[rank] = token
        missing = [rank for rank in missing if not store.check([f"present/{job}/{rank}"])]
        if missing:
            if time.monotonic() > deadline:
                raise AbsentRankError(missing[0])
            if time.monotonic() > note_s:
                note_s = deadline
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                logging.getLogger("zeroir").info(
                    "Waiting for rank %d%s of %d ranks to join.", missing[0], more, world_size
                )
            time.sleep(_POLL_S)


def _awaited(store: KeyValueStore, key: str, deadline: float) -> bool:
    """Wait for the key, and return whether it got a value in time.

    The store notifies, so thousands of ranks need not poll.
    """
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except dist.DistStoreError:
        return False
    return True
