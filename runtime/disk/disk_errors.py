"""One sentence for each system error while buffers are on disk."""

from __future__ import annotations

import errno
from typing import Final

from zeroir.errors import UserError

_BROKEN_DISK: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODEV, errno.ENXIO)
"""Errors of a disk that fails or was removed, and of a damaged file system."""

_ANOTHER: Final = "name a folder on another disk"


def unusable(folder: str, rank: int, error: OSError, *, shortage: str = "") -> UserError:
    """Return the error that a rank cannot keep buffers in a folder; ``shortage`` says how many bytes are missing."""
    return UserError(
        f"Rank {rank} cannot keep its buffers on disk in '{folder}': {_reason(error, shortage)}."
    )


def unreadable(folder: str, rank: int, error: OSError) -> UserError:
    """Return the error that a rank cannot read its buffers on disk."""
    return UserError(
        f"Rank {rank} cannot read its buffers on disk in '{folder}': {_reason(error)}; go on from the last checkpoint."
    )


def unwritable(folder: str, rank: int, error: OSError) -> UserError:
    """Return the error that a rank cannot write its buffers on disk."""
    return UserError(
        f"Rank {rank} cannot write its buffers on disk in '{folder}': {_reason(error)}; go on from the last checkpoint."
    )


def truncated(folder: str, rank: int) -> UserError:
    """Return the error that a file has become shorter than it was created."""
    return UserError(
        f"Rank {rank} cannot read its buffers on disk in '{folder}': the file has become shorter, so something else "
        "changes it; name a folder of your own, and go on from the last checkpoint."
    )


def stuck(folder: str, rank: int) -> UserError:
    """Return the error that a disk accepts no further bytes, and gives no reason."""
    return UserError(
        f"Rank {rank} cannot write its buffers on disk in '{folder}': the disk takes no further bytes; {_ANOTHER}, and "
        "go on from the last checkpoint."
    )


def _reason(error: OSError, shortage: str = "") -> str:
    match error.errno:
        case errno.ENOSPC:
            return f"its disk is full{shortage}: free space, use more ranks, or {_ANOTHER}"
        case errno.EDQUOT:
            return f"your quota on its disk is used up{shortage}: free space, use more ranks, or {_ANOTHER}"
        case errno.EFBIG:
            return "the file is larger than its file system or your limits allow: use more ranks or another disk"
        case errno.EACCES | errno.EPERM:
            return "you may not write there: change the permissions or name another folder"
        case errno.EROFS:
            return "its file system is read-only: name a folder on another one"
        case errno.ENOENT:
            return "it does not exist: make it, or name another folder"
        case errno.ENOTDIR:
            return "it is not a folder: name a folder"
        case errno.ENAMETOOLONG:
            return "the name is too long: name a shorter one"
        case errno.EMFILE | errno.ENFILE:
            return "too many files are open: raise the limit (ulimit -n)"
        case errno.ESTALE:
            return f"its server has forgotten the file: {_ANOTHER}"
        case number if number in _BROKEN_DISK:
            return f"its disk fails ({_told(error)}): see the system's log and {_ANOTHER}"
        case _:
            return f"{_told(error)}: {_ANOTHER}"


def _told(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
