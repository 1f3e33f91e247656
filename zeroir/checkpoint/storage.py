"""Where checkpoints are: the files and folders of a disk, or the objects of a store that fsspec opens.

Paths are strings as the user wrote them: ``runs/a`` or ``s3://bucket/runs/a``. Parts of paths are joined with ``/``.
Every method turns an error of the system into one ``UserError`` that names the path and a remedy.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from zeroir.errors import UserError

CHECKPOINT_NAME: Final = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})(?:-([2-9]|[1-9][0-9]+))?")
"""Names of checkpoints in the folder of a job: ``step-00000100``, or ``step-00000100-2`` for the second of a step."""

PAUSES_S: Final = (0.5, 2.0)
"""The pauses between attempts after a ``PassingError``."""


class PassingError(UserError):
    """A failure of a store or the network between, which may pass; whether the call had its effect is not known."""


class OutputFile(Protocol):
    """A file while it is written, from its start to its end."""

    def write(self, data: memoryview) -> None:
        """Append bytes (a contiguous view of any element type). The view is not used after the call."""

    def finish(self) -> None:
        """Close the file when its bytes are durable."""

    def abandon(self) -> None:
        """Close and remove the file. It raises nothing, and does nothing after ``finish``."""


class InputFile(Protocol):
    """A file while it is read."""

    @property
    def size_bytes(self) -> int:
        """The size of the file."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a writable buffer of bytes from an offset in the file; fewer bytes are read only at the file's end."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name in a folder."""

    name: str
    is_folder: bool


class Hold(Protocol):
    """The lock of a folder of checkpoints, which this process has."""

    def require(self) -> None:
        """Check that the path still leads to the folder that was locked. Any thread may call this.

        Raises:
            UserError: if the folder was renamed, removed or replaced, or another job has its lock now.
        """


class Storage(Protocol):
    """A file system for checkpoints."""

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """What stands in a folder, in the order of names; nothing if there is no such folder."""

    def size_bytes(self, path: str) -> int | None:
        """The size of a file; None if there is no such file."""

    def create(self, path: str) -> OutputFile:
        """Begin a file that does not exist."""

    def open(self, path: str, *, from_disk: bool = False) -> InputFile:
        """Open a file for reading. ``from_disk`` passes over what the system keeps of it in memory, where it can."""

    def begin(self, target: str, token: str) -> str:
        """Make the folder in which the files of the checkpoint ``target`` are written aside, and name it.

        A store without renames returns ``target`` itself; its readers see no checkpoint before there is a manifest.

        Raises:
            UserError: if something is at ``target`` already.
        """

    def file_name(self, rank: int, token: str) -> str:
        """The name of a rank's file; it contains the token where two jobs may write to one folder."""

    def publish(self, folder: str, target: str, manifest: bytes) -> None:
        """Make the written files and the manifest durable, then let them appear at ``target`` at one instant.

        Every file in the folder has been finished by its writer.

        Raises:
            UserError: if something is at ``target``, or the disk or the store fails. Unless that says otherwise, the
                checkpoint has not appeared.
        """

    def discard(self, folder: str, token: str, *, was_sent: bool) -> None:
        """Remove what was written aside. ``was_sent`` says that ``publish`` was tried, and failed."""

    def has_appeared(self, folder: str) -> bool:
        """Whether readers see a checkpoint in a folder that has the name of one."""

    def remove(self, folder: str) -> None:
        """Remove a checkpoint: it disappears at one instant, then its space is freed."""

    def leftovers(self, root: str) -> tuple[str, ...]:
        """What killed jobs left in a folder of checkpoints with a ``CHECKPOINT_NAME``."""

    def lock(self, root: str) -> AbstractContextManager[Hold]:
        """Keep other jobs from saving to a folder of checkpoints while the context is open.

        Raises:
            UserError: if another job has the lock.
        """


def join(folder: str, name: str) -> str:
    """The path of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}" if folder else name


def parent_and_name(path: str) -> tuple[str, str]:
    """The folder of a path (``.`` for a bare name) and its last name."""
    head, _, name = path.rstrip("/").rpartition("/")
    return (head or ("/" if path.startswith("/") else ".")), name
