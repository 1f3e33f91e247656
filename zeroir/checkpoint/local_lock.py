"""The lock of a local folder of checkpoints: one job at a time saves there, and it notices if the folder is moved."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from zeroir.checkpoint.file_errors import unwritable
from zeroir.checkpoint.storage import join
from zeroir.errors import UserError

LOCK_NAME: Final = ".lock"
LOCK_WAIT_S: Final = 5.0
"""How long a job waits for the lock, since processes of a job that was just killed may still be ending."""


class LocalHold:
    """The lock of a folder: that of the file ``.lock`` in it, which moves with the folder.

    Raises:
        UserError: if another job has it, or the folder cannot be written.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = join(root, LOCK_NAME)
        self._lock = FileLock(self._path, timeout=LOCK_WAIT_S, thread_local=False)
        self._using = threading.Lock()
        self._folder = _identity(root)
        self._file = self._acquired()

    def require(self) -> None:
        """Check that the path is still the locked folder; if the lock's file was removed, lock it again.

        Raises:
            UserError: if the folder was renamed, removed or replaced, or another job has its lock now.
        """
        with self._using:
            if _identity(self._root) != self._folder:
                raise UserError(
                    f"'{self._root}' was renamed, removed or replaced while this job saves checkpoints to it: move it "
                    "back and start the job again, or name another folder."
                )
            if _identity(self._path) != self._file:
                self._lock.release()
                self._file = self._acquired()

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _acquired(self) -> tuple[int, int] | None:
        """Take the lock and return the identity of its file."""
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"Another job{_holder(self._path)} saves checkpoints to '{self._root}': end it first, or name another "
                "folder."
            ) from error
        except OSError as error:
            raise unwritable(self._path, error) from error
        # Only for the messages of other jobs; a full disk is reported when it matters.
        with contextlib.suppress(OSError):
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            Path(self._path).write_text(holder, "utf-8")
        return _identity(self._path)


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a path, which a rename keeps; None if there is nothing."""
    try:
        status = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unwritable(path, error) from error
    return status.st_dev, status.st_ino


def _holder(path: str) -> str:
    """Return the process that has a lock, in parentheses; an empty string if it has not written that yet."""
    try:
        holder = Path(path).read_text("utf-8")
    except (OSError, ValueError):
        return ""
    return f" ({holder})" if re.fullmatch(r"process [0-9]+ on \S+", holder) else ""
