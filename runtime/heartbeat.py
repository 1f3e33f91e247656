"""A sign of life from every rank, so that one that was stopped is told from one that is slow.

A collective waits minutes for a late rank, because loading, compiling and reading data may take that long. A rank whose
process is frozen, or whose machine is out of reach, need not be waited for: each rank counts up in the job's store,
whatever its main thread is busy with, and looks whether the next rank's count moves. Where the store itself is gone,
the process that kept it is, torchrun's agent or rank 0, and nobody is left to end this rank but itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.runtime.rendezvous import JOIN_TIMEOUT, KeyValueStore, LaunchEnvironment, open_store

_INTERVAL_S: Final = 3.0
_SILENCE_S: Final = 60.0
_DONE: Final = b"done"

Alarm = Callable[[str], None]
"""Hears in one sentence why the job cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTiming:
    """Seconds between two signs of life, and of silence after which a rank is given up."""

    interval_s: float = _INTERVAL_S
    silence_s: float = _SILENCE_S


class Heartbeat:
    """This rank's signs of life, and its watch over the next rank of the ring.

    ``on_alarm`` hears, in the watching thread, that the next rank has been silent for too long after its first sign of
    life, or that the store is gone.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world_size: int,
        on_alarm: Alarm,
        timing: HeartbeatTiming | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._next = (rank + 1) % world_size
        self._on_alarm = on_alarm
        self._timing = timing or HeartbeatTiming()
        self._is_over = threading.Event()
        # A daemon: a store that no longer answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="zeroir-heartbeat", daemon=True)
        self._thread.start()

    def break_off(self) -> None:
        """End the watch, and fall silent."""
        self._is_over.set()
        self._thread.join(self._timing.interval_s)

    def stop(self) -> None:
        """End the watch, and tell the others that this rank's silence is no alarm from now on.

        Rank 0 stays until the others have done the same, for the store may end with its process.
        """
        self.break_off()
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._rank), _DONE.decode())
            deadline = time.monotonic() + self._timing.silence_s
            others = range(1, self._world_size) if self._rank == 0 else ()
            for rank in others:
                while self._heard(rank) != _DONE and time.monotonic() < deadline:
                    time.sleep(0.01)

    def _run(self) -> None:
        try:
            self._watch()
        except RuntimeError:
            if not self._is_over.is_set():
                self._on_alarm(
                    "The job's store is gone: torchrun's agent or the process of rank 0 was killed, or its machine "
                    "cannot be reached."
                )

    def _watch(self) -> None:
        seen, count = b"", 0
        heard = ticked = time.monotonic()
        while not self._is_over.is_set():
            count += 1
            self._store.set(str(self._rank), str(count))
            found = self._heard(self._next)
            now = time.monotonic()
            # Who was itself stopped for a while cannot say how long others were silent.
            was_away = now - ticked > 3 * self._timing.interval_s
            if found != seen or was_away:
                seen, heard = found, now
            elif now - heard > self._timing.silence_s and found not in (b"", _DONE):
                self._on_alarm(
                    f"Rank {self._next} has given no sign of life for {self._timing.silence_s:.0f} s: it was stopped, "
                    "or its machine cannot be reached."
                )
                return
            ticked = now
            self._is_over.wait(self._timing.interval_s)

    def _heard(self, rank: int) -> bytes:
        key = str(rank)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


@contextlib.contextmanager
def watched(
    launch: LaunchEnvironment, on_alarm: Alarm, timing: HeartbeatTiming | None = None
) -> Iterator[None]:
    """Watch over the job that torchrun started while the body runs; a process that is alone has nothing to watch.

    Raises:
        UserError: where the job's store cannot be reached.
    """
    if launch.world_size == 1:
        yield
        return
    # A connection of its own: the job's may be busy waiting.
    store = open_store(launch, "heartbeat", JOIN_TIMEOUT)
    heartbeat = Heartbeat(store, launch.rank, launch.world_size, on_alarm, timing)
    try:
        yield
    except BaseException:
        # The interpreter's end would abort the process if it met the thread in torch's store.
        heartbeat.break_off()
        raise
    heartbeat.stop()
