"""A sign of life from every rank, so that one that was stopped is told from one that is slow.

A collective waits minutes for a late rank, because loading, compiling and reading data may take that long. A rank whose
process is frozen, or whose machine is out of reach, need not be waited for: each rank counts up in the job's store,
whatever its main thread is busy with, and looks whether the next rank's count moves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

_INTERVAL_S: Final = 10.0
_SILENCE_S: Final = 60.0
_DONE: Final = "done"


class Store(Protocol):
    """What is needed of torch's stores, whose types torch does not export."""

    def set(self, key: str, value: str, /) -> None:
        """Let every rank read the value."""

    def get(self, key: str, /) -> bytes:
        """The value; waits for one."""

    def check(self, keys: list[str], /) -> bool:
        """Whether there is a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Seconds between two signs of life, and of silence after which a rank is given up."""

    interval_s: float = _INTERVAL_S
    silence_s: float = _SILENCE_S


class Heartbeat:
    """This rank's signs of life, and its watch over the next rank of the ring.

    ``on_silence`` hears the rank that has been silent for too long, in the watching thread. When the store itself is
    gone the watch ends: who held it has ended, which torchrun sees by itself.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        on_silence: Callable[[int], None],
        beat: Beat | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._next = (rank + 1) % world_size
        self._on_silence = on_silence
        self._beat = beat or Beat()
        self._is_over = threading.Event()
        # A daemon: a store that no longer answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="zeroir-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, and tell the others that this rank's silence is no alarm from now on."""
        self._is_over.set()
        self._thread.join(self._beat.interval_s)
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._rank), _DONE)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._watch()

    def _watch(self) -> None:
        seen, count = b"", 0
        heard = ticked = time.monotonic()
        while not self._is_over.is_set():
            count += 1
            self._store.set(str(self._rank), str(count))
            found = self._heard()
            now = time.monotonic()
            # Who was itself stopped for a while cannot say how long others were silent.
            was_away = now - ticked > 3 * self._beat.interval_s
            if found != seen or was_away:
                seen, heard = found, now
            elif now - heard > self._beat.silence_s and found != _DONE.encode():
                self._on_silence(self._next)
                return
            ticked = now
            self._is_over.wait(self._beat.interval_s)

    def _heard(self) -> bytes:
        key = str(self._next)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


@contextlib.contextmanager
def watched(rank: int, world_size: int, on_silence: Callable[[int], None]) -> Iterator[None]:
    """Watch over the job that torchrun started while the body runs; without torchrun there is nothing to watch."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if world_size == 1 or address is None or port is None:
        yield
        return
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    try:
        # A connection of its own: the job's may be busy waiting.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        shared: Store = dist.PrefixStore(f"zeroir/heartbeat/{run}", store)  # type: ignore[attr-defined]
    except RuntimeError:
        # The job was joined all the same, so it runs; only its timeouts will notice a rank that was stopped.
        yield
        return
    heartbeat = Heartbeat(shared, rank, world_size, on_silence)
    yield
    heartbeat.stop()
