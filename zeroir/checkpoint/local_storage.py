"""Checkpoints on disks: they are durable before they are visible, and become visible by one rename.

POSIX guarantees only what was synced: the bytes of a file after its ``fsync``, the names in a folder after the
folder's. So a folder is renamed only once all its content is durable. The tests record the system calls and simulate a
power failure between any two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zeroir.checkpoint.file_errors import unreadable, unwritable
from zeroir.checkpoint.local_lock import LocalHold
from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.checkpoint.storage import CHECKPOINT_NAME, Entry, join, parent_and_name
from zeroir.errors import DamagedCheckpointError, UserError

WRITE_BYTES: Final = 256 << 10
"""The bytes of one write. Kernels that cache files in large pages are slower with writes of megabytes."""

_ASIDE: Final = re.compile(r"\.(.+)\.(saving|deleting)-[0-9a-f]{12}")
"""Folders that are not visible as checkpoints: not yet, or no longer."""
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
"""Errors of file systems that cannot sync folders, such as some FUSE ones; there, names are durable at once."""


@dataclass(slots=True, kw_only=True)
class LocalOutput:
    """A file on a disk that is being written."""

    path: str
    descriptor: int | None

    def write(self, data: memoryview) -> None:
        """Append bytes without copying them.

        Raises:
            UserError: if the disk is full or fails.
        """
        rest = data.cast("B") if data.nbytes else data
        try:
            while rest.nbytes:
                rest = rest[os.write(self._open(), rest[:WRITE_BYTES]) :]
        except OSError as error:
            raise unwritable(self.path, error) from error

    def finish(self) -> None:
        """Sync and close the file.

        Raises:
            UserError: if the disk fails. Which bytes it has is then unknown, so the write is not repeated.
        """
        try:
            os.fsync(self._open())
            self._close()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def abandon(self) -> None:
        """Close and remove the file, unless it is finished."""
        if self.descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

    def _open(self) -> int:
        if self.descriptor is None:
            raise ValueError(f"'{self.path}' is closed")
        return self.descriptor

    def _close(self) -> None:
        descriptor, self.descriptor = self._open(), None
        os.close(descriptor)


@dataclass(slots=True, kw_only=True)
class LocalInput:
    """A file on a disk that is being read."""

    path: str
    descriptor: int
    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer; fewer bytes are read only at the file's end.

        Raises:
            UserError: if the disk fails.
        """
        filled = 0
        try:
            while filled < buffer.nbytes:
                count = os.preadv(self.descriptor, [buffer[filled:]], offset + filled)
                if count == 0:
                    break
                filled += count
        except OSError as error:
            raise unreadable(self.path, error) from error
        return filled

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStorage:
    """The file systems of this machine, including those that several machines have mounted."""

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """Return the names in a folder in order; none if there is no such folder."""
        try:
            with os.scandir(folder) as names:
                return tuple(
                    sorted(
                        (Entry(name=name.name, is_folder=name.is_dir()) for name in names),
                        key=lambda entry: entry.name,
                    )
                )
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise unreadable(folder, error) from error

    def size_bytes(self, path: str) -> int | None:
        """Return the size of a file; None if there is no such file."""
        try:
            status = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def create(self, path: str) -> LocalOutput:
        """Create a file that does not exist."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(path, error) from error
        return LocalOutput(path=path, descriptor=descriptor)

    def open(self, path: str, *, from_disk: bool = False) -> LocalInput:
        """Open a file for reading; ``from_disk`` drops the system's cached pages of it first."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpointError(f"'{path}' is not a file: use another checkpoint.")
            if from_disk:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise unreadable(path, error) from error
            raise
        return LocalInput(path=path, descriptor=descriptor, size_bytes=status.st_size)

    def begin(self, target: str, token: str) -> str:
        """Make the folder ``.NAME.saving-TOKEN`` next to the target, and missing parent folders."""
        parent, name = parent_and_name(target)
        folder = join(parent, f".{name}.saving-{token}")
        _require_free(target)
        make_folders(parent)
        try:
            Path(folder).mkdir()
        except OSError as error:
            raise unwritable(folder, error) from error
        return folder

    def file_name(self, rank: int, token: str) -> str:
        """Return a name such as ``rank-00000.safetensors``, without the token: no other job uses the folder."""
        del token
        return f"rank-{rank:05}.safetensors"

    def publish(self, folder: str, target: str, manifest: bytes) -> None:
        """Sync the manifest and the folder, rename the folder, and sync its parent."""
        file = None
        try:
            file = self.create(join(folder, MANIFEST_NAME))
            file.write(memoryview(manifest))
            file.finish()
            _sync_folder(folder)
            _require_free(target)
            Path(folder).rename(target)
            _sync_folder(parent_and_name(target)[0])
        except OSError as error:
            raise unwritable(target, error) from error
        finally:
            if file is not None:
                file.abandon()

    def discard(self, folder: str, token: str, *, was_sent: bool) -> None:
        """Remove a folder that was not renamed."""
        del token, was_sent
        self.remove(folder)

    def has_appeared(self, folder: str) -> bool:
        """Return True: a folder has this name only if it contains a manifest."""
        del folder
        return True

    def remove(self, folder: str) -> None:
        """Rename a checkpoint to ``.NAME.deleting-TOKEN``, durably, and remove that; remove a leftover at once.

        For a symbolic link, only the link is removed.
        """
        parent, name = parent_and_name(folder)
        try:
            if not _ASIDE.fullmatch(name):
                aside = join(parent, f".{name}.deleting-{secrets.token_hex(6)}")
                Path(folder).rename(aside)
                _sync_folder(parent)
                folder = aside
            if Path(folder).is_symlink():
                Path(folder).unlink()
            else:
                _remove_tree(Path(folder))
        except OSError as error:
            raise UserError(
                f"'{folder}' cannot be removed: {error.strerror}; remove it by hand."
            ) from error

    def leftovers(self, root: str) -> tuple[str, ...]:
        """Return the folders ``.NAME.saving-TOKEN`` and ``.NAME.deleting-TOKEN`` where NAME is a checkpoint's name.

        Folders of other names belong to callers that save without the lock, and may be in use.
        """
        folders = []
        for entry in self.entries(root):
            aside = _ASIDE.fullmatch(entry.name)
            if aside is not None and entry.is_folder and CHECKPOINT_NAME.fullmatch(aside[1]):
                folders.append(join(root, entry.name))
        return tuple(folders)

    @contextlib.contextmanager
    def lock(self, root: str) -> Iterator[LocalHold]:
        """Lock the file ``.lock`` of a folder, which is made if missing.

        The system releases it when the process ends.
        """
        make_folders(root)
        hold = LocalHold(root)
        try:
            yield hold
        finally:
            hold.release()


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, durably.

    Raises:
        UserError: if a folder cannot be made, or a file has its name.
    """
    parent, name = parent_and_name(path)
    try:
        if Path(path).is_dir():
            return
        if parent != path and name:
            make_folders(parent)
        with contextlib.suppress(FileExistsError):
            Path(path).mkdir()
        if not Path(path).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _sync_folder(parent)
    except OSError as error:
        raise unwritable(path, error) from error


def _require_free(target: str) -> None:
    if os.path.lexists(target):
        raise unwritable(target, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))


def _sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _remove_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            path.unlink()
    folder.rmdir()
