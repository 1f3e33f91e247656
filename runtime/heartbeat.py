"""A sign of life from every rank, which tells a rank that was stopped from one that is slow.

A collective waits minutes for a late rank, because loading, compiling and reading data may take that long. It need not
wait for a rank whose process is frozen or whose machine cannot be reached. So a thread of each rank increments a
counter in the job's store, and checks that the next rank's counter moves. When the store itself is lost, the
process that kept it has ended (torchrun's agent or rank 0), and this rank must end itself.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.runtime.rendezvous import JOIN_TIMEOUT, LaunchEnvironment, open_store
from zeroir.runtime.roll_call import KeyValueStore
from zeroir.runtime.whereabouts import Whereabouts, behind

INTERVAL_S: Final = 3.0
_SILENCE_S: Final = 60.0
_DONE: Final = b"done"

Alarm = Callable[[str], None]
"""Receives one sentence that says why the job cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTiming:
    """Seconds between two signs of life, and seconds of silence after which a rank counts as lost."""

    interval_s: float = INTERVAL_S
    silence_s: float = _SILENCE_S


class Heartbeat:
    """Gives this rank's signs of life, and watches the next rank of the ring.

    A sign of life also says where the rank is in its program, once there is a ``tell``. The watching thread calls
    ``on_alarm`` when the next rank, after its first sign of life, has been silent for too long, or when the store is
    lost.
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
        self.tell: Callable[[], Whereabouts] | None = None
        self._is_over = threading.Event()
        # A daemon, because a store that no longer answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="zeroir-heartbeat", daemon=True)
        self._thread.start()

    def break_off(self) -> None:
        """End the watch and the signs of life."""
        self._is_over.set()
        self._thread.join(self._timing.interval_s)

    def stop(self) -> None:
        """End the watch, and tell the other ranks that this rank's silence is no alarm from now on.

        Rank 0 stays until the others have done the same, because the store may end with its process.
        """
        self.break_off()
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._rank), _DONE.decode())
            deadline = time.monotonic() + self._timing.silence_s
            awaited = range(1, self._world_size) if self._rank == 0 else ()
            for rank in awaited:
                while self._count_of(rank) != _DONE and time.monotonic() < deadline:
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
        last_count, own_count = b"", 0
        changed_s = checked_s = time.monotonic()
        while not self._is_over.is_set():
            own_count += 1
            told = "" if self.tell is None else self.tell().encoded()
            self._store.set(str(self._rank), f"{own_count} {told}")
            count = self._count_of(self._next)
            now_s = time.monotonic()
            # A rank that was itself stopped does not know how long others were silent.
            was_stopped = now_s - checked_s > 3 * self._timing.interval_s
            if count != last_count or was_stopped:
                last_count, changed_s = count, now_s
            elif now_s - changed_s > self._timing.silence_s and count not in (b"", _DONE):
                place = self._place_of(self._next)
                self._on_alarm(
                    f"Rank {self._next} has given no sign of life for {self._timing.silence_s:.0f} s: it was stopped, "
                    "or its machine cannot be reached."
                    + ("" if place is None else f" It was {place.text}.")
                )
                return
            checked_s = now_s
            self._is_over.wait(self._timing.interval_s)

    def ranks_behind(self) -> str | None:
        """A sentence on the ranks that are behind the others by their last signs of life; None where none is known."""
        try:
            return behind([self._place_of(rank) for rank in range(self._world_size)])
        except RuntimeError:  # the store is gone
            return None

    def is_first_with(self, sentence: str) -> bool:
        """Whether no other rank has come here with this sentence, whatever numbers it names; True without the store."""
        name = re.sub(r"\d+", "0", sentence)
        try:
            return self._store.add(f"said/{name}", 1) == 1
        except RuntimeError:  # the store is gone
            return True

    def _place_of(self, rank: int) -> Whereabouts | None:
        return Whereabouts.decoded(self._count_of(rank).decode().partition(" ")[2])

    def _count_of(self, rank: int) -> bytes:
        """The counter of a rank and its whereabouts, or ``_DONE``; empty before its first sign of life."""
        key = str(rank)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


@contextlib.contextmanager
def watched(
    launch: LaunchEnvironment, on_alarm: Alarm, timing: HeartbeatTiming | None = None
) -> Iterator[Heartbeat | None]:
    """Run a heartbeat while the body runs; a job of one rank needs none.

    Raises:
        UserError: where the job's store cannot be reached.
    """
    if launch.world_size == 1:
        yield None
        return
    # A connection of its own, because the job's may be blocked in a wait.
    store = open_store(launch, "heartbeat", JOIN_TIMEOUT)
    heartbeat = Heartbeat(store, launch.rank, launch.world_size, on_alarm, timing)
    try:
        yield heartbeat
    except BaseException:
        # The interpreter would abort the process at its end if the thread were inside torch's store.
        heartbeat.break_off()
        raise
    heartbeat.stop()
