"""SIGTERM as a request to end soon: the ranks finish their step and save, and none is killed in the middle of it.

torchrun sends SIGTERM to the ranks of a machine when it restarts them or must end itself, and SIGKILL to those that
still run 30 s later; cluster schedulers give about as long before they take a machine away.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PATIENCE_S: Final = 20.0
"""Seconds for a rank to finish its step; a rank that does not may be waiting for a lost one."""


class StopSignal:
    """Whether this process got SIGTERM.

    ``is_sent`` refers to this process alone; ranks have to agree on the step after which all of them stop.
    ``on_overdue`` ends the process: a thread calls it at a second SIGTERM, and where ``acknowledge`` does not follow
    the first one within ``patience_s``. Only a thread can, because a collective that waits for a lost rank blocks the
    main thread. The same thread calls ``on_sent`` at the first SIGTERM.
    """

    def __init__(
        self,
        on_overdue: Callable[[], object],
        on_sent: Callable[[], object] = lambda: None,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.is_sent = False
        self._on_overdue = on_overdue
        self._on_sent = on_sent
        self._patience_s = patience_s
        self._is_over = False
        self._own, self._other = socket.socketpair()
        self._other.setblocking(False)  # as set_wakeup_fd requires
        self._thread = threading.Thread(target=self._watch, name="zeroir-sigterm", daemon=True)
        # The interpreter handles signals only between two operations, but writes their numbers here at once.
        self._fd_before = signal.set_wakeup_fd(self._other.fileno(), warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread.start()

    def acknowledge(self) -> None:
        """Note that the step is finished: the process now ends by itself, however long its save takes."""
        self._end_watch()

    def close(self) -> None:
        """Let SIGTERM end the process again."""
        self._end_watch()
        signal.set_wakeup_fd(self._fd_before)
        signal.signal(signal.SIGTERM, self._handler_before)
        self._own.close()
        self._other.close()

    def _end_watch(self) -> None:
        self._is_over = True
        self._other.send(b"\0")
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over:
            try:
                number = self._own.recv(1)
            except TimeoutError:
                self._on_overdue()
                return
            if number == bytes([signal.SIGTERM]):
                if self.is_sent:
                    self._on_overdue()
                    return
                self.is_sent = True
                self._on_sent()
                self._own.settimeout(self._patience_s)


@contextmanager
def stop_signal(
    on_overdue: Callable[[], object], on_sent: Callable[[], object] = lambda: None
) -> Iterator[StopSignal]:
    """Let SIGTERM set a flag while the block runs, instead of ending the process."""
    stop = StopSignal(on_overdue, on_sent)
    try:
        yield stop
    finally:
        stop.close()
