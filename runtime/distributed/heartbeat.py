"""A sign of life from every rank, which distinguishes a stopped rank from a slow one.

A collective waits minutes for a late rank, because loading, compiling and reading data may take that long. It need not
wait for a rank whose process is frozen or has ended, or whose machine cannot be reached. So a small process beside each
rank writes to the job's store that the rank's process runs (``signs_of_life``), and a thread of the rank writes the
rank's position in its program and checks that the next rank's signs of life continue. When the store itself is lost,
the process that hosted it has ended (torchrun's agent or rank 0), and this rank must end as well. It must also end when
the store does not answer because a link between machines is down: TCP itself would wait for a quarter of an hour. The
thread that talks to the store blocks in that case, so another thread watches it.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Self

from zeroir.runtime.distributed.rank_discovery import KeyValueStore
from zeroir.runtime.distributed.rank_position import RankPosition, behind, rank_name, ranks_by_host
from zeroir.runtime.distributed.rendezvous import JOIN_TIMEOUT, LaunchEnvironment, open_store
from zeroir.runtime.distributed.signs_of_life import (
    ENDED,
    end_signs_of_life,
    key_of_life,
    start_signs_of_life,
)

INTERVAL_S: Final = 3.0
NOTICED_S: Final = INTERVAL_S + 1.0
"""Seconds until the previous rank has noticed the end of a rank, or every rank the loss of the store."""
_HURRIED_S: Final = 0.1
_SILENCE_S: Final = 60.0
_PURPOSE: Final = "heartbeat"
_DONE: Final = b"done"
_ENDS: Final = "ends: "
"""The beginning of the last sign of life of a rank that ends because of another one; the reason follows."""

Alarm = Callable[[str], None]
"""A function that receives a sentence on why the job cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTiming:
    """Seconds between two signs of life, and seconds of silence after which a rank counts as lost.

    At the end of a job rank 0 keeps the store for at most ``closing_s``, or for the silence if that is longer: ranks
    may take long to close their files and workers.
    """

    interval_s: float = INTERVAL_S
    silence_s: float = _SILENCE_S
    closing_s: float = 0.0

    @classmethod
    def within(cls, timeout: timedelta) -> Self:
        """Return a silence of a fifth of the timeout of collectives, at most a minute."""
        silence_s = min(_SILENCE_S, timeout.total_seconds() / 5)
        interval_s = min(INTERVAL_S, silence_s / 20)
        return cls(interval_s=interval_s, silence_s=silence_s, closing_s=_SILENCE_S)


class Heartbeat:
    """Sends this rank's signs of life, and watches the next rank of the ring.

    A sign of life includes the rank's position in its program, once ``tell`` is set. ``on_alarm`` is called when the
    next rank, after its first sign of life, or the store has been silent for too long, when that rank's process has
    ended too early, or when the store is lost. ``hosts`` has the name of every rank's machine, once all have joined;
    ``place`` is the store's address.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world_size: int,
        on_alarm: Alarm,
        timing: HeartbeatTiming | None = None,
        place: str = "",
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._next = (rank + 1) % world_size
        self._on_alarm = on_alarm
        self._timing = timing or HeartbeatTiming()
        self._place = place
        self.tell: Callable[[], RankPosition] | None = None
        self.hosts: Sequence[str] = ()
        self._is_over = threading.Event()
        self._is_hurried = threading.Event()
        self._is_closed = threading.Event()
        self._answers = 0
        # Daemons, because a store that no longer answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="zeroir-heartbeat", daemon=True)
        watch = threading.Thread(target=self._watch_store, name="zeroir-store-watch", daemon=True)
        self._thread.start()
        watch.start()

    def hurry(self) -> None:
        """Look after the next rank at once and many times a second, because this rank was asked to end.

        torchrun asks when a rank has failed, which this one may be waiting for.
        """
        self._is_hurried.set()

    def break_off(self) -> None:
        """Stop the watch and the signs of life."""
        self._is_closed.set()
        self._end_signs()

    def _end_signs(self) -> None:
        self._is_over.set()
        self._is_hurried.set()
        self._thread.join(self._timing.interval_s)

    def stop(self) -> None:
        """Stop the watch, and tell the other ranks that this rank's silence is no longer an alarm.

        Rank 0 waits until the others have done the same, because the store may end with its process.
        """
        self._end_signs()
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._rank), _DONE.decode())
            deadline = time.monotonic() + max(self._timing.closing_s, self._timing.silence_s)
            awaited = range(1, self._world_size) if self._rank == 0 else ()
            for rank in awaited:
                while self._is_awaited(rank) and time.monotonic() < deadline:
                    self._answers += 1
                    time.sleep(0.01)
        self._is_closed.set()

    def _is_awaited(self, rank: int) -> bool:
        return self._count_of(rank) != _DONE and self._life_of(rank) != ENDED

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
        last_signs, own_count = (b"", b""), 0
        changed_s = checked_s = time.monotonic()
        while not self._is_over.is_set():
            own_count += 1
            told = "" if self.tell is None else self.tell().encoded()
            self._store.set(str(self._rank), f"{own_count} {told}")
            count, life = self._count_of(self._next), self._life_of(self._next)
            self._answers += 1
            now_s = time.monotonic()
            # A rank that was itself stopped does not know how long others were silent.
            was_stopped = now_s - checked_s > 3 * self._timing.interval_s
            if (count, life) != last_signs or was_stopped:
                last_signs, changed_s = (count, life), now_s
            is_silent = count != b"" and now_s - changed_s > self._timing.silence_s
            if count.startswith(_ENDS.encode()):
                self._pass_on(count.decode().removeprefix(_ENDS))
                return
            if count != _DONE and (life == ENDED or is_silent):
                self._pass_on(self._missed(self._next, has_ended=life == ENDED))
                return
            checked_s = now_s
            if self._is_hurried.wait(self._timing.interval_s):
                self._is_over.wait(_HURRIED_S)

    def _pass_on(self, why: str) -> None:
        """Raise the alarm.

        First tell the previous rank why, because otherwise it would only notice that this one has ended.
        """
        self._store.set(str(self._rank), f"{_ENDS}{why}")
        self._on_alarm(why)

    def _missed(self, rank: int, *, has_ended: bool) -> str:
        place, name = self._place_of(rank), rank_name(rank, self.hosts)
        where = "" if place is None else f" At its last sign of life it was {place.text}."
        if has_ended:
            return f"{name} has ended before the others, which wait for it: look at what it printed.{where}"
        return (
            f"{name} has given no sign of life for {self._timing.silence_s:.0f} s: it was stopped, or its machine "
            f"cannot be reached.{where}"
        )

    def _watch_store(self) -> None:
        answers = -1
        changed_s = checked_s = time.monotonic()
        while not self._is_closed.wait(self._timing.interval_s):
            now_s = time.monotonic()
            was_stopped = now_s - checked_s > 3 * self._timing.interval_s
            checked_s = now_s
            if self._answers != answers or was_stopped:
                answers, changed_s = self._answers, now_s
            elif now_s - changed_s > self._timing.silence_s:
                self._on_alarm(self._silent_store())
                return

    def _silent_store(self) -> str:
        silence = (
            f"The job's store{self._place} has not answered for {self._timing.silence_s:.0f} s"
        )
        if not self.hosts or self.hosts[self._rank] == self.hosts[0]:
            return f"{silence}: the process that keeps it was stopped, or its machine cannot be reached."
        keeper = ranks_by_host(self.hosts, only=self.hosts[0])
        own = self.hosts[self._rank]
        return (
            f"{silence}: rank {self._rank} on {own} cannot reach it, and with it {keeper}. The link between the "
            "machines is down, or the store's machine is."
        )

    def ranks_behind(self) -> str | None:
        """Return a sentence on a rank that has ended, or else on those that are behind by their last signs of life.

        Return None where no such rank is known.
        """
        sentences: list[str | None] = []

        def ask() -> None:
            ranks = range(self._world_size)
            with contextlib.suppress(RuntimeError):  # the store is gone
                sentences.extend(
                    self._missed(rank, has_ended=True)
                    for rank in ranks
                    if self._life_of(rank) == ENDED and self._count_of(rank) != _DONE
                )
                sentences.append(behind([self._place_of(rank) for rank in ranks], self.hosts))

        # The store may not answer.
        asking = threading.Thread(target=ask, name="zeroir-ranks-behind", daemon=True)
        asking.start()
        asking.join(self._timing.interval_s)
        return sentences[0] if sentences else None

    def is_first_with(self, sentence: str) -> bool:
        """Return whether this rank is the first with this sentence, up to the numbers in it; True without the store."""
        name = re.sub(r"\d+", "0", sentence)
        try:
            return self._store.add(f"said/{name}", 1) == 1
        except RuntimeError:  # the store is gone
            return True

    def _place_of(self, rank: int) -> RankPosition | None:
        count = self._count_of(rank).decode()
        return None if count.startswith(_ENDS) else RankPosition.decoded(count.partition(" ")[2])

    def _count_of(self, rank: int) -> bytes:
        """Return the last sign of life of a rank: counter and position, ``_DONE``, or why it ends.

        Empty before the first.
        """
        return self._value_of(str(rank))

    def _life_of(self, rank: int) -> bytes:
        return self._value_of(key_of_life(rank))

    def _value_of(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


@contextlib.contextmanager
def watched(
    launch: LaunchEnvironment, on_alarm: Alarm, timing: HeartbeatTiming | None = None
) -> Iterator[Heartbeat | None]:
    """Run a heartbeat while the block runs; a job of one rank needs none.

    Raises:
        UserError: where the job's store cannot be reached.
    """
    if launch.world_size == 1:
        yield None
        return
    client = replace(launch, is_host=False)
    process = start_signs_of_life(
        launch.rank,
        lambda timeout: open_store(client, _PURPOSE, timeout),
        (timing or HeartbeatTiming()).interval_s,
    )
    # A separate connection, because the job's own may be blocked in a wait.
    store = open_store(launch, _PURPOSE, JOIN_TIMEOUT)
    place = f" at {launch.address}:{launch.port}"
    heartbeat = Heartbeat(store, launch.rank, launch.world_size, on_alarm, timing, place)
    try:
        yield heartbeat
    except BaseException:
        # At exit the interpreter would abort the process if the thread were inside torch's store.
        heartbeat.break_off()
        raise
    heartbeat.stop()
    end_signs_of_life(process)
