"""The files that commands write. A file is replaced only by a file of the same kind, completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from zeroir.errors import UserError

MAGIC: Final = b"\x89zeroir\n"
"""The first bytes of compiled programs. They are not ASCII, unlike a text; a copy as text changes the newline."""

_HEAD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKind:
    """A kind of file that commands write: its name, an example of a path, and a pattern of its first 4 kB."""

    noun: str
    example: str
    head: re.Pattern[bytes]


PROGRAM: Final = OutputKind(
    noun="a compiled program", example="gpt.zir", head=re.compile(re.escape(MAGIC))
)
CERTIFICATE: Final = OutputKind(
    noun="a certificate",
    example="gpt.certificate",
    head=re.compile(rb"[\x80-\x8f]\xa6format\xb2zeroir certificate"),
)
TIMELINE: Final = OutputKind(
    noun="a timeline", example="trace.json", head=re.compile(rb'(?s)\{.*"traceEvents"')
)
MACHINE: Final = OutputKind(
    noun="a machine file", example="here.toml", head=re.compile(rb"(?s)(.*\n)?accelerator *=")
)
PAGE: Final = OutputKind(
    noun="a report",
    example="gpt.html",
    head=re.compile("(?s)<!DOCTYPE html>.* · zeroir</title>".encode()),
)
SNAPSHOT: Final = OutputKind(
    noun="a memory snapshot",
    example="gpt.pickle",
    head=re.compile(rb"(?s)\x80\x04.{,20}segments"),
)
GRAPH: Final = OutputKind(noun="a graph", example="gpt.dot", head=re.compile(rb"digraph zeroir \{"))
STATE_DICT: Final = OutputKind(
    noun="a state_dict",
    example="weights.pt",
    head=re.compile(rb"(?s)PK\x03\x04.{26}archive/data\.pkl"),
)
DUMP: Final = OutputKind(
    noun="a flight-recorder dump",
    example="rank_0",
    head=re.compile(rb"(?s)\x80\x04.{,20}version"),
)


def require_writable(path: str | Path, kind: OutputKind) -> None:
    """Check that a file of the kind can be written at the path, before any work is done for it.

    An existing file may be replaced only if it is empty or of the same kind.

    Raises:
        UserError: if the file cannot be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(
                f"'{path}' is a folder: name a file to write, for instance {path / kind.example}."
            )
        if _is_device(path):
            return
        folder = path.parent if not path.is_symlink() else path.resolve().parent
        is_folder = folder.is_dir()
        head = _head(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    except RuntimeError as error:
        raise UserError(f"'{path}' cannot be written: it is a link to itself.") from error
    if not is_folder:
        raise UserError(f"'{path}' cannot be written: there is no folder '{folder}'.")
    if not os.access(folder, os.W_OK):
        raise UserError(f"'{path}' cannot be written: you may not write in '{folder}'.")
    if head and not kind.head.match(head):
        problem = f"exists and is not {kind.noun}"
        if PROGRAM.head.match(head):
            problem = f"is {PROGRAM.noun}"
        raise UserError(
            f"'{path}' {problem}: name another file to write, for instance {kind.example}."
        )


def write_whole(path: Path, data: bytes, kind: OutputKind) -> None:
    """Write a file completely or not at all; links are followed, and devices and pipes are written directly.

    Raises:
        UserError: if the path cannot be written, or is a file of another kind.
    """
    with written_whole(path, kind) as file:
        file.write(data)


@contextlib.contextmanager
def written_whole(path: Path, kind: OutputKind) -> Iterator[BinaryIO]:
    """Give a file to write into, and let it appear at the path if the body succeeds, as ``write_whole`` does.

    Raises:
        UserError: if the path cannot be written, or is a file of another kind.
    """
    require_writable(path, kind)
    if _is_device(path):
        try:
            with path.open("wb") as device:
                yield device
        except OSError as error:
            raise _unwritable(path, error) from error
        return
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _head(path: Path) -> bytes:
    """Return the first bytes of the file; none if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return b""


def _is_device(path: Path) -> bool:
    """Return whether the path is a device or a pipe, such as /dev/null, which no file may replace."""
    return path.exists() and not path.is_file()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"'{path}' cannot be written: {error.strerror or error}.")
