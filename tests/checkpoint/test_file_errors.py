"""Each error of the system has a remedy of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from zeroir.checkpoint.file_errors import unreadable, unwritable
from zeroir.errors import DamagedCheckpointError, UserError

TOO_MANY = "too many files are open: raise the limit (ulimit -n)"
WRITING = {
    errno.ENOSPC: "its disk is full: free space or name a folder on another disk",
    errno.EDQUOT: "your quota on its disk is used up: free space or name a folder on another disk",
    errno.EFBIG: "the file is larger than its file system or your limits allow",
    errno.EACCES: "you may not write there: change the permissions or name another folder",
    errno.EPERM: "you may not write there",
    errno.EROFS: "its file system is read-only: name a folder on another one",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "it exists, and a checkpoint never replaces anything: name another path",
    errno.ENOTEMPTY: "it exists",
    errno.ENOENT: "its folder is not there",
    errno.ENAMETOOLONG: "the name is too long: name a shorter one",
    errno.EMFILE: TOO_MANY,
    errno.ENFILE: TOO_MANY,
    errno.EIO: "its disk fails (Input/output error): see the system's log",
    errno.EBADMSG: "its disk fails (Bad message): see the system's log",
    errno.ENXIO: "No such device or address: name another folder",
}
READING = {
    errno.ENOENT: "it does not exist: name a folder that contains a checkpoint",
    errno.ENOTDIR: "it does not exist",
    errno.EISDIR: "it is a folder: name a file",
    errno.EACCES: "you may not read it: change the permissions",
    errno.EPERM: "you may not read it",
    errno.EMFILE: TOO_MANY,
    errno.ENFILE: TOO_MANY,
    errno.EIO: "its disk fails (Input/output error): see the system's log and use another checkpoint",
    errno.EUCLEAN: "its disk fails (Structure needs cleaning)",
    errno.ESTALE: "it was removed while it was read: use another checkpoint",
    errno.ENXIO: "No such device or address: use another checkpoint",
}
DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EUCLEAN, errno.ESTALE}
CASES = [
    *((unwritable, "written", number, reason) for number, reason in WRITING.items()),
    *((unreadable, "read", number, reason) for number, reason in READING.items()),
]


@pytest.mark.parametrize(("told", "what", "number", "reason"), CASES)
def test_the_sentence_names_the_path_the_reason_and_the_remedy(
    told: Callable[[str, OSError], UserError], what: str, number: int, reason: str
) -> None:
    error = told("saved/a", OSError(number, os.strerror(number)))
    assert str(error).startswith(f"'saved/a' cannot be {what}: {reason}")
    assert str(error).endswith(".")
    is_damage = told is unreadable and number in DAMAGES
    assert isinstance(error, DamagedCheckpointError) is is_damage


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert str(unreadable("a", OSError())) == "'a' cannot be read: OSError: use another checkpoint."
    assert str(unwritable("a", OSError("so"))) == "'a' cannot be written: so: name another folder."
