"""The interface of a storage for checkpoints: a file system, or an object store that fsspec opens.

Paths are strings as the user wrote them: ``runs/a`` or ``s3://bucket/runs/a``. Parts of paths are joined with ``/``.
Every method converts an error of the system into one ``UserError`` that names the path and a remedy.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from zeroir.errors import UserError

CHECKPOINT_NAME: Final = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})(?:-([2-9]|[1-9][0-9]+))?")
"""Names of checkpoints in a job's folder: ``step-00000100``, or ``step-00000100-2`` for the second of a step."""

PAUSES_S: Final = (0.5, 2.0)
"""The pauses between attempts after a ``PassingError``."""


class PassingError(UserError):
    """A failure of a store or the network that may be temporary; the call may have taken effect."""


class OutputFile(Protocol):
    """A file that is being written sequentially."""

    def write(self, data: memoryview) -> None:
        """Append bytes (a contiguous view of any element type). The view is not used after the call."""

    def finish(self) -> None:
        """Make the bytes durable and close the file."""

    def abandon(self) -> None:
        """Close and remove the file. It raises nothing, and does nothing after ``finish``."""


class InputFile(Protocol):
    """A file that is being read."""

    @property
    def size_bytes(self) -> int:
        """The size of the file."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a writable buffer from an offset in the file; fewer bytes are read only at the file's end."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name in a folder."""

    name: str
    is_folder: bool


class Hold(Protocol):
    """The lock of a folder of checkpoints, held by this process."""

    def require(self) -> None:
        """Check that the path is still the locked folder. Any thread may call this.

        Raises:
            UserError: if the folder was renamed, removed or replaced, or another job has its lock now.
        """


class Storage(Protocol):
    """A file system for checkpoints."""

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """Return the names in a folder in order; none if there is no such folder."""

    def size_bytes(self, path: str) -> int | None:
        """Return the size of a file; None if there is no such file."""

    def create(self, path: str) -> OutputFile:
        """Create a file that does not exist."""

    def open(self, path: str, *, from_disk: bool = False) -> InputFile:
        """Open a file for reading. ``from_disk`` bypasses the system's cache of the file, where possible."""

    def begin(self, target: str, token: str) -> str:
        """Make the folder where the files of the checkpoint ``target`` are written, and return its path.

        A store without renames returns ``target`` itself; its readers see no checkpoint before there is a manifest.

        Raises:
            UserError: if something is at ``target`` already.
        """

    def file_name(self, rank: int, token: str) -> str:
        """Return the name of a rank's file, which contains the token if two jobs may write to one folder."""

    def publish(self, folder: str, target: str, manifest: bytes) -> None:
        """Make the written files and the manifest durable, then make them appear at ``target`` atomically.

        Every file in the folder has been finished by its writer.

        Raises:
            UserError: if something is at ``target``, or the disk or the store fails. Unless the message says otherwise,
                the checkpoint has not appeared.
        """

    def discard(self, folder: str, token: str, *, was_sent: bool) -> None:
        """Remove the files that were written. ``was_sent`` says that ``publish`` was tried, and failed."""

    def has_appeared(self, folder: str) -> bool:
        """Return whether a folder with a checkpoint's name is visible to readers as a checkpoint."""

    def remove(self, folder: str) -> None:
        """Remove a checkpoint: it disappears atomically, then its space is freed."""

    def leftovers(self, root: str) -> tuple[str, ...]:
        """Return what killed jobs left of checkpoints with a ``CHECKPOINT_NAME`` in a folder."""

    def lock(self, root: str) -> AbstractContextManager[Hold]:
        """Lock a folder of checkpoints, so that no other job saves to it within the context.

        Raises:
            UserError: if another job has the lock.
        """


def join(folder: str, name: str) -> str:
    """Join a folder and a name to a path."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


def parent_and_name(path: str) -> tuple[str, str]:
    """Split a path into its folder (``.`` for a bare name) and its last name."""
    head, _, name = path.rstrip("/").rpartition("/")
    return (head or ("/" if path.startswith("/") else ".")), name
