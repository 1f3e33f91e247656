"""The file operations of a process below one folder: recorded in order, and made to fail where asked.

``recorder.c`` is loaded before the C library, so it sees the operations of Python and of every extension. A log has
one line for each operation (its kind, inode, number, two paths, and a length), followed by so many bytes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("recorder.c")


class OperationKind(StrEnum):
    """The kinds of operations; the values are those of the log."""

    CREATE = "C"
    LINK = "H"
    MAKE_FOLDER = "K"
    MARK = "M"
    REMOVE = "U"
    RENAME = "R"
    RESIZE = "L"
    SYNC = "F"
    WRITE = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOperation:
    """One operation that succeeded.

    ``number`` is the offset of a write, or the new size in bytes. ``path`` is absolute; for a mark it is the text.
    """

    kind: OperationKind
    inode: int = 0
    number: int = 0
    path: str = ""
    second_path: str = ""
    data: bytes = b""


def has_compiler() -> bool:
    """Whether the recorder can be built here: on Linux, with a C compiler."""
    return shutil.which("cc") is not None and os.uname().sysname == "Linux"


def build(folder: Path) -> Path:
    """Compile the recorder into the folder, and return the library for LD_PRELOAD."""
    library = folder / "recorder.so"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        str(SOURCE),
        "-o",
        str(library),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


def read_log(path: Path) -> Iterator[FileOperation]:
    """The operations of a log, the first one first."""
    with path.open("rb") as log:
        for line in log:
            kind, inode, number, first, second, size = line.decode().rstrip("\n").split("\t")
            yield FileOperation(
                kind=OperationKind(kind),
                inode=int(inode),
                number=int(number),
                path=first,
                second_path=second,
                data=log.read(int(size)),
            )


class Recorder:
    """The recorder in this process, which was started with the library in LD_PRELOAD.

    Raises:
        AttributeError: where it was not.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.recorder_fail.argtypes = [ctypes.c_long, ctypes.c_int]
        self._library.recorder_count.restype = ctypes.c_long

    def start(self, root: Path, log: Path) -> None:
        """Record what happens below ``root`` at the end of the file ``log``, which is elsewhere."""
        if self._library.recorder_start(os.fsencode(root), os.fsencode(log)) != 0:
            raise OSError(f"{root} cannot be recorded to {log}")

    def mark(self, text: str) -> None:
        """Put a mark between the operations."""
        self._library.recorder_mark(text.encode())

    def fail(self, number: int, error: int) -> None:
        """Let the operation with this number, counted from now on, fail with an ``errno``.

        After ENOSPC all operations that need space fail, until the next call. A negative number stands for none.
        """
        self._library.recorder_fail(number, error)

    def count(self) -> int:
        """The operations since the last call of ``fail``."""
        return int(self._library.recorder_count())
