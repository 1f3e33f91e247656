"""Saves under way: a thread writes files while training goes on, and failures come to light at the next occasion."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

from zeroir.errors import InternalError, ZeroirError, printable


class PendingSave:
    """A save that has begun. ``path`` is where the checkpoint will be; on ranks other than 0 once it is there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._is_reported = False

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> str:
        """Return the path when the checkpoint is there, durable.

        Raises:
            UserError: where it could not be saved.
        """
        self._done.wait()
        self.report()
        return self.path

    def report(self) -> None:
        """Raise the failure, the first time that this is called after it."""
        if self._done.is_set() and self._failure is not None and not self._is_reported:
            self._is_reported = True
            raise self._failure

    def unreported_failure(self) -> BaseException | None:
        """Wait for the end, and return the failure if nobody knows of it yet."""
        self._done.wait()
        return None if self._is_reported else self._failure

    def end(self, path: str, failure: BaseException | None = None) -> None:
        """Note the end of the save."""
        self.path = path
        self._failure = failure
        self._done.set()


class BackgroundWriter:
    """Runs one save at a time in a thread; the next one waits for it.

    A failure is raised once: by ``PendingSave.wait``, or else by the next of ``report`` and ``join``. If the process
    ends before, it is printed, and the exit code is the error's.
    """

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

    def begin(self, path: str, save: Callable[[], str]) -> PendingSave:
        """Begin a save, which returns the path of the checkpoint, after the one that is under way has ended.

        Raises:
            UserError: where that one failed, and nobody knows yet; then this one does not begin.
        """
        self.join()
        pending = PendingSave(path)

        def run() -> None:
            try:
                pending.end(save())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread of the engine
                pending.end(path, error)

        # A daemon, because a thread that hangs with a lost peer must not keep a failed process alive.
        thread = threading.Thread(target=run, name="zeroir-save", daemon=True)
        if self._thread is None:
            _call_at_end(self._end_process)
        self._pending, self._thread = pending, thread
        thread.start()
        return pending

    def report(self) -> None:
        """Raise the failure of a save that has ended, if nobody knows of it yet."""
        if self._pending is not None:
            self._pending.report()

    def join(self) -> None:
        """Wait for the save under way.

        Raises:
            UserError: as ``report``.
        """
        if self._pending is not None:
            self._pending.wait()

    def close(self) -> None:
        """Wait for the save under way, the last one.

        Raises:
            UserError: as ``report``.
        """
        self.join()

    def _end_process(self) -> None:
        """At the end of the process, wait, and do not let a failure pass for success."""
        failure = None if self._pending is None else self._pending.unreported_failure()
        if failure is None:
            return
        if isinstance(failure, ZeroirError):
            sys.stderr.write(printable(f"Error: {failure}\n"))
            code = failure.exit_code
        else:
            traceback.print_exception(failure)
            code = InternalError.exit_code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call_at_end(end: Callable[[], None]) -> None:
    """Call something when the main thread has ended, while pools of threads still take work.

    The functions of ``atexit`` come later: no pool takes work then, and drivers of stores look names up in one. Python
    calls what is registered here in reverse order, so that the end of the pools, which their import registers, is last.
    """
    importlib.import_module("concurrent.futures.thread")
    register = getattr(threading, "_register_atexit", atexit.register)
    register(end)
