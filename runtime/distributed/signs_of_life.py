"""A process beside each rank that tells the other ranks whether the rank's process runs, is stopped or has ended.

A thread of the rank cannot do this: a call into a library may hold the GIL for minutes, and a process that calls
``os._exit`` says nothing. The operating system knows both. The process is forked, because a new one that imports torch
would need seconds and much memory.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn

from zeroir.errors import UserError
from zeroir.runtime.distributed.rank_discovery import KeyValueStore

ENDED: Final = b"ended"
"""The last sign of a process that has ended."""

_POLL_S: Final = 0.1
"""Seconds between two checks of the process."""
_LONGEST_GOODBYE_S: Final = 1

OpenStore = Callable[[timedelta], KeyValueStore]
"""A function that opens a new connection to the store within a time; UserError where it cannot be reached."""


def key_of_life(rank: int) -> str:
    """Return the store's key for the signs of life of a rank: its value is a number that grows, or ``ENDED``."""
    return f"life/{rank}"


def start_signs_of_life(rank: int, open_store: OpenStore, interval_s: float) -> int:
    """Start the process, which ends with this one, and return its id. This process should not have threads yet."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns of threads, whose locks the copy could never acquire; the copy uses none of these locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _live_beside(parent, rank, open_store, interval_s)
    return process


def end_signs_of_life(process: int) -> None:
    """End that process, so that no further sign of life is sent."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _live_beside(parent: int, rank: int, open_store: OpenStore, interval_s: float) -> NoReturn:
    try:
        _leave_to_parent()
        store: KeyValueStore | None = None
        count, next_s = 0, 0.0
        while os.getppid() == parent:
            if store is None:
                store = _opened(open_store)
            elif time.monotonic() >= next_s and not _is_stopped(parent):
                count += 1
                next_s = time.monotonic() + interval_s
                store.set(key_of_life(rank), str(count))
            time.sleep(min(_POLL_S, interval_s))
        if store is not None:
            signal.alarm(_LONGEST_GOODBYE_S)
            store.set(key_of_life(rank), ENDED.decode())
    finally:
        os._exit(0)


def _leave_to_parent() -> None:
    """Leave signals, open files and garbage collection to the parent process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    gc.disable()  # A collection would copy memory that both processes share.


def _opened(open_store: OpenStore) -> KeyValueStore | None:
    try:
        return open_store(timedelta(seconds=2))
    except UserError:  # not written yet; the rank itself does it
        return None


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False where the system does not tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
