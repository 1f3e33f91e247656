"""Messages for the errors of object stores, and retries of those that may be temporary.

The drivers of fsspec raise errors of their own classes as well as Python's, so unknown ones are reported by their class
and message. Every call here is idempotent, so it may be repeated.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeVar

from zeroir.checkpoint.file_errors import unreadable, unwritable
from zeroir.checkpoint.storage import PAUSES_S, PassingError
from zeroir.errors import UserError

_LASTING: Final = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)
_LASTING_ERRNO: Final = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.EPERM,
        errno.EROFS,
    }
)

_Result = TypeVar("_Result")


class Access(Enum):
    """The kind of access of a call, for messages."""

    READ = "read"
    WRITE = "written"


def attempt(call: Callable[[], _Result], path: str, access: Access) -> _Result:
    """Call a driver, and repeat the call while its errors may be temporary.

    Raises:
        FileExistsError, FileNotFoundError: as the driver raised them.
        UserError: in one sentence, for any other error.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return call()
        except (FileExistsError, FileNotFoundError, UserError):
            raise
        except Exception as error:
            if pause_s is None or not may_pass(error):
                raise failure(path, access, error) from error
            time.sleep(pause_s)
    raise AssertionError


def may_pass(error: Exception) -> bool:
    """Return whether a retry may succeed: after errors of the network, an overloaded server, or unknown ones."""
    if isinstance(error, OSError) and error.errno in _LASTING_ERRNO:
        return False
    return not isinstance(error, _LASTING) and not _is_about_credentials(error)


def failure(path: str, access: Access, error: Exception) -> UserError:
    """Return the message for an error of a driver."""
    if _is_about_credentials(error):
        return UserError(
            f"'{path}' cannot be {access.value}: {_told(error)}; give the credentials as the driver of {_scheme(path)} "
            "expects them (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
        )
    match error:
        case FileNotFoundError():
            reason = f"{_told(error)}: create the bucket, or name another one"
        case PermissionError():
            reason = f"the store refuses it ({_told(error)}): check the credentials and the bucket's permissions"
        case FileExistsError():
            reason = "it exists, and a checkpoint never replaces anything: name another path"
        case NotImplementedError():
            reason = f"the driver of {_scheme(path)} cannot do it: name another store"
        case OSError(errno=int() as number) if number in _LASTING_ERRNO - {errno.EINVAL}:
            return (unreadable if access is Access.READ else unwritable)(path, error)
        case _ if may_pass(error):
            return PassingError(
                f"'{path}' cannot be {access.value}: {_told(error)}; check the network and the store, and try again."
            )
        case _:
            reason = f"{_told(error)}: check the URL and the store"
    return UserError(f"'{path}' cannot be {access.value}: {reason}.")


def _is_about_credentials(error: Exception) -> bool:
    return any("Credential" in kind.__name__ for kind in type(error).__mro__)


def _scheme(path: str) -> str:
    return f"{path.partition('://')[0]}://"


def _told(error: Exception) -> str:
    """Return the message of an error on one line, after the name of its class where that is informative."""
    message = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    message = " ".join(message.split()).rstrip(".")
    kind = type(error).__name__
    if not message:
        return kind
    return message if isinstance(error, OSError) else f"{kind}: {message}"
