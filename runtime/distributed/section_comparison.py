"""Ranks that wait for each other compare the sections that they have run.

Ranks that take different numbers of micro-steps would wait for each other in different collectives until the timeout.
So each rank keeps a short history of its sections. When it has started none for some seconds, a thread writes the
history to the job's store, and compares it with that of the next rank. While no rank waits, nothing is sent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zeroir.errors import UserError, leave_reason
from zeroir.runtime.comm.job import Job, PeerError, exchanged_texts
from zeroir.runtime.distributed.rank_discovery import KeyValueStore
from zeroir.runtime.distributed.section_history import (
    CHANGED_CODE,
    SectionEntry,
    SectionHistory,
    decoded,
    difference,
)

GRACE_S: Final = 5.0
"""Seconds without a new section after which a rank compares its history."""

SHOWN_S: Final = GRACE_S + 3.0
"""Seconds within which every waiting rank has published its history."""

_INTERVAL_S: Final = 1.0
_POLL_S: Final = 0.2
_SHORTEST_POLL_S: Final = 0.0005
_END_S: Final = 10.0
"""Seconds that an agent needs to end the other ranks after one has printed the reason."""


class SectionsOfRanks:
    """The histories of all ranks of a job, which create and close this together."""

    def __init__(self, job: Job) -> None:
        self._rank, self._world_size = job.rank, dist.get_world_size()
        self._history = SectionHistory()
        # An earlier engine, or the job before a restart, may have left keys in the same store.
        token = exchanged_texts(uuid.uuid4().hex, job.device)[0]
        # A separate connection, because the job's own may be blocked in a wait.
        store = cast("Any", distributed_c10d._get_default_store()).clone()
        self._store: KeyValueStore = dist.PrefixStore(f"zeroir/sections/{token}", store)  # type: ignore[attr-defined]
        self._is_over = threading.Event()
        # At the interpreter's end the thread must not be inside torch's store.
        atexit.register(self._is_over.set)
        threading.Thread(target=self._watch, name="zeroir-sections", daemon=True).start()

    def begin(self, section: str, step: int, micro_steps: int) -> None:
        """Record a section with collectives, as a ``SectionEntry``."""
        self._history.add(SectionEntry(section, step, micro_steps))

    def meet(self, change: str, step: int, micro_steps: int, timeout: timedelta) -> None:
        """Wait until all ranks have found a change of the user's code; only the store is used for it.

        A rank that exchanged a message at once, while others run a section, would let the backend crash.

        Raises:
            UserError: where other ranks run a section instead.
            PeerError: on the ranks that do not say so first, or where a rank does not come within ``timeout``.
        """
        self._history.add(SectionEntry(CHANGED_CODE, step, micro_steps, change))
        self.show()
        key = f"change/{self._history.count}"
        begun_s = compared_s = time.monotonic()
        pause_s = _SHORTEST_POLL_S
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._world_size:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
            now_s = time.monotonic()
            if now_s - begun_s > timeout.total_seconds():
                raise PeerError(
                    f"Rank {self._rank} has to compile again ({change}), and some ranks did not come to it within "
                    f"{timeout.total_seconds():.0f} s: another rank stopped or is stuck."
                )
            if now_s - compared_s < _INTERVAL_S:
                continue
            compared_s = now_s
            if self._difference([self._rank, (self._rank + 1) % self._world_size]) is not None:
                error = self.error(0)
                assert error is not None
                raise error

    def show(self) -> None:
        """Write this rank's current history to the store, for the other ranks."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(str(self._rank), self._history.encoded())

    def error(self, patience_s: float) -> UserError | None:
        """Return the error that the ranks differ, if their histories show it within ``patience_s``."""
        self.show()
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):  # the store is gone
            while True:
                sentence = self._difference(range(self._world_size))
                if sentence is not None:
                    return (UserError if self._is_first() else PeerError)(sentence)
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Stop the comparison."""
        self._is_over.set()
        atexit.unregister(self._is_over.set)

    def _watch(self) -> None:
        seen, seen_s, following = 0, 0.0, (self._rank + 1) % self._world_size
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._is_over.wait(_INTERVAL_S):
                if self._history.count != seen:
                    seen, seen_s = self._history.count, time.monotonic()
                if time.monotonic() - seen_s < GRACE_S:
                    continue
                self.show()
                # Each rank compares with one other, because thousands of ranks may wait.
                if self._difference([self._rank, following]) is not None:
                    self._end()

    def _end(self) -> NoReturn:
        """Print how the ranks differ, and end the process, whose main thread is blocked in a collective."""
        time.sleep(2 * _INTERVAL_S)  # By then the other ranks have published their histories.
        sentence = self._difference(range(self._world_size))
        if not self._is_first():
            time.sleep(_END_S)
        sentence = f"Error: {sentence}"
        sys.stderr.write(f"{sentence}\n")
        leave_reason(sentence)
        sys.stderr.flush()
        os._exit(UserError.exit_code)

    def _difference(self, ranks: Sequence[int]) -> str | None:
        shown = [rank for rank in ranks if self._store.check([str(rank)])]
        return difference({rank: decoded(self._store.get(str(rank)).decode()) for rank in shown})

    def _is_first(self) -> bool:
        return self._store.add("said", 1) == 1
