"""The unnamed file of one rank: no trace of it remains however the process ends, and no other job can open it.

The file is created without a name (``O_TMPFILE``), or its name is removed at once on file systems that do not support
this. The system frees it when the last process that has it open ends, or after a power failure when the file system is
next mounted. So there is nothing to lock, recognise or clean up, and several jobs may use one folder.

All bytes are allocated before the first step (``posix_fallocate``), so a full disk is noticed there. Reads and writes
bypass the page cache (``O_DIRECT``) where the file system allows it, because the host memory is needed for buffers.
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
"""Offsets of buffers in the file are multiples of this; so are addresses, offsets and sizes of direct reads and writes.

It is a multiple of the logical block size of every disk that Linux supports with pages of this size."""

_NO_UNNAMED_FILES: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
"""The errors of ``O_TMPFILE`` on file systems and kernels that do not support it."""


class ScratchFile:
    """An open, unnamed file in ``folder``, or in the folder for temporary files.

    Raises:
        UserError: where the folder does not exist or no file can be created there.
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
        """Whether the page cache is bypassed; then offsets, sizes and addresses must be multiples of a page."""

    def reserve(self, size_bytes: int) -> int:
        """Allocate bytes, initially zero, at the end of the file; return their offset, a multiple of a page.

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
    """Return the bytes rounded up to whole pages."""
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
    """Bypass the page cache from now on; return False where the file system does not support it, as those in memory."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


def _shortage(folder: str, size_bytes: int) -> str:
    """Return how many bytes are needed and free, in parentheses."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({_told(size_bytes)} are needed, {_told(free_bytes)} are free)"


def _told(size_bytes: int) -> str:
    if size_bytes < 10**9:
        return f"{size_bytes / 10**6:.3g} MB"
    return f"{size_bytes / 10**9:,.4g} GB"
