"""Messages for the operating system's errors while checkpoints are written and read."""

from __future__ import annotations

import errno
from typing import Final

from zeroir.errors import DamagedCheckpointError, UserError

_BROKEN_DISK: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)
"""The disk fails, or its file system or a file on it is damaged."""
_DAMAGES: Final = frozenset(
    (*_BROKEN_DISK, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE)
)


def unwritable(path: str, error: OSError) -> UserError:
    """Return the error for a path that cannot be written, with its remedy."""
    match error.errno:
        case errno.ENOSPC:
            reason = "its disk is full: free space or name a folder on another disk"
        case errno.EDQUOT:
            reason = (
                "your quota on its disk is used up: free space or name a folder on another disk"
            )
        case errno.EFBIG:
            reason = "the file is larger than its file system or your limits allow: use more ranks or another disk"
        case errno.EACCES | errno.EPERM:
            reason = "you may not write there: change the permissions or name another folder"
        case errno.EROFS:
            reason = "its file system is read-only: name a folder on another one"
        case errno.ENOTDIR:
            reason = "a part of the path is a file, not a folder: name another folder"
        case errno.EEXIST | errno.ENOTEMPTY:
            reason = "it exists, and a checkpoint never replaces anything: name another path"
        case errno.ENOENT:
            reason = (
                "its folder is not there: all machines of a job must share the folder of its checkpoints, and nobody "
                "may remove it while a job saves to it"
            )
        case errno.ENAMETOOLONG:
            reason = "the name is too long: name a shorter one"
        case errno.EMFILE | errno.ENFILE:
            reason = "too many files are open: raise the limit (ulimit -n)"
        case number if number in _BROKEN_DISK:
            reason = f"its disk fails ({_told(error)}): see the system's log and name a folder on another disk"
        case _:
            reason = f"{_told(error)}: name another folder"
    return UserError(f"'{path}' cannot be written: {reason}.")


def unreadable(path: str, error: OSError) -> UserError:
    """Return the error for a path that cannot be read, with its remedy.

    It is a ``DamagedCheckpointError`` if other checkpoints may be readable.
    """
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            reason = "it does not exist: name a folder that contains a checkpoint"
        case errno.EISDIR:
            reason = "it is a folder: name a file"
        case errno.EACCES | errno.EPERM:
            reason = "you may not read it: change the permissions"
        case errno.EMFILE | errno.ENFILE:
            reason = "too many files are open: raise the limit (ulimit -n)"
        case number if number in _BROKEN_DISK:
            reason = (
                f"its disk fails ({_told(error)}): see the system's log and use another checkpoint"
            )
        case errno.ESTALE:
            reason = "it was removed while it was read: use another checkpoint"
        case _:
            reason = f"{_told(error)}: use another checkpoint"
    kind = DamagedCheckpointError if error.errno in _DAMAGES else UserError
    return kind(f"'{path}' cannot be read: {reason}.")


def _told(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
