"""The file of one rank. It has no name: nothing is left of it however the process ends, and no other job can open it.

The file is made in a folder without a name (``O_TMPFILE``), or its name is removed at once where a file system knows no
such files. The system frees it with the last process that has it open; after a power cut, when the file system is next
mounted. So there is nothing to lock, to recognise or to clean up, and several jobs may use one folder.

All bytes are allocated before the first step (``posix_fallocate``), so a full disk shows there. Reads and writes go
past the page cache (``O_DIRECT``) where the file system allows that: the host memory is needed for buffers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from zeroir.runtime.disk.disk_errors import unusable

PAGE_BYTES: Final = 4096
"""Places in the file are multiples of this; so are the addresses, offsets and sizes of direct reads and writes.

It is a multiple of the logical block size of every disk that Linux supports with pages of this size.
"""

_NO_UNNAMED_FILES: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
"""What ``O_TMPFILE`` gives on file systems and kernels without it."""


class ScratchFile:
    """An open file without a name in ``folder``, or in the folder for temporary files.

    Raises:
        UserError: where the folder does not exist or takes no files.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = str(Path(tempfile.gettempdir()) if folder is None else folder)
        self.rank = rank
        self.size_bytes = 0
        try:
            self.descriptor = _open_without_name(self.folder)
        except OSError as error:
            raise unusable(self.folder, rank, error) from error
        weakref.finalize(self, os.close, self.descriptor)
        self.is_direct = _go_past_page_cache(self.descriptor)
        """Whether the page cache is left out; then offsets, sizes and addresses must be multiples of a page."""

    def reserve(self, size_bytes: int) -> int:
        """Allocate bytes, which are zeros, at the end of the file; returns their offset, a multiple of a page.

        Raises:
            UserError: where the disk has too little space, or a limit or quota forbids a file of that size.
        """
        offset = self.size_bytes
        size_bytes = whole_pages(size_bytes)
        if size_bytes:
            try:
                os.posix_fallocate(self.descriptor, offset, size_bytes)
            except OSError as error:
                shortage = _shortage(self.folder, size_bytes)
                raise unusable(self.folder, self.rank, error, shortage=shortage) from error
        self.size_bytes += size_bytes
        return offset


def whole_pages(size_bytes: int) -> int:
    """The bytes rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _open_without_name(folder: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
    descriptor, path = tempfile.mkstemp(prefix=".zeroir-", dir=folder)
    try:
        Path(path).unlink()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _go_past_page_cache(descriptor: int) -> bool:
    """Leave out the page cache from now on; False where the file system refuses, as those in memory do."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


def _shortage(folder: str, size_bytes: int) -> str:
    """How many bytes are needed and free, in parentheses."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({_told(size_bytes)} are needed, {_told(free_bytes)} are free)"


def _told(size_bytes: int) -> str:
    if size_bytes < 10**9:
        return f"{size_bytes / 10**6:.3g} MB"
    return f"{size_bytes / 10**9:,.4g} GB"
