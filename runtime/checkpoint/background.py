"""Saves in a background thread: training continues meanwhile, and a failed save raises its error at the next call."""

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
    """A save in progress. ``path`` is where the checkpoint will be; ranks other than 0 learn it when the save ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._is_reported = False

    @property
    def is_done(self) -> bool:
        """Whether the save has finished, successfully or not."""
        return self._done.is_set()

    def wait(self) -> str:
        """Wait until the checkpoint is complete and durable, and return its path.

        Raises:
            UserError: where it could not be saved.
        """
        self._done.wait()
        self.report()
        return self.path

    def report(self) -> None:
        """Raise the error of a failed save, once: later calls do nothing."""
        if self._done.is_set() and self._failure is not None and not self._is_reported:
            self._is_reported = True
            raise self._failure

    def unreported_failure(self) -> BaseException | None:
        """Wait until the save ends; return its error if it was not raised before."""
        self._done.wait()
        return None if self._is_reported else self._failure

    def end(self, path: str, failure: BaseException | None = None) -> None:
        """Record that the save has ended."""
        self.path = path
        self._failure = failure
        self._done.set()


class BackgroundWriter:
    """Runs saves in a thread, one at a time: a new save waits until the previous one ends.

    A failure is raised once: by ``PendingSave.wait``, or else by the next call of ``report`` or ``join``. If the
    process ends before that, the failure is printed and determines the exit code.
    """

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

    def begin(self, path: str, save: Callable[[], str]) -> PendingSave:
        """Start ``save``, which returns the path of the checkpoint, after the previous save has ended.

        Raises:
            UserError: where the previous save failed and its error was not raised before; then this one does not start.
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
        """Raise the error of a finished save that failed, unless it was raised before."""
        if self._pending is not None:
            self._pending.report()

    def join(self) -> None:
        """Wait for the current save to end.

        Raises:
            UserError: as ``report``.
        """
        if self._pending is not None:
            self._pending.wait()

    def close(self) -> None:
        """Wait for the last save to end.

        Raises:
            UserError: as ``report``.
        """
        self.join()

    def _end_process(self) -> None:
        """Wait for the save when the process ends.

        Print the error of a save that failed unnoticed, and exit with its code.
        """
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
    """Call a function when the main thread has ended, while thread pools still accept work.

    Functions of ``atexit`` run later: by then no pool accepts work, and drivers of object stores resolve names in one.
    Python calls what is registered here in reverse order, so the import of the pools' module, which registers their
    shutdown, comes first.
    """
    importlib.import_module("concurrent.futures.thread")
    register = getattr(threading, "_register_atexit", atexit.register)
    register(end)
