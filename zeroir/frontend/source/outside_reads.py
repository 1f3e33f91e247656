"""Files, and variables of the environment, that the user's code reads while it is traced."""

from __future__ import annotations

import builtins
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from zeroir.frontend.source.source_lines import is_users_file, line_of_call

_OF_CODE: Final = (".py", ".pyc", ".so")
_WRITES: Final = frozenset("wax+")
_LARGE: Final = 1 << 20
"""Bytes; of a larger file the size and the time of the last change count instead of the contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideReads:
    """What code has read outside Python's objects: paths of ``files`` and names of ``variables``, and who read each.

    Of ``paths`` it has asked whether they exist, and of ``folders`` what is in them. The values are lines of the user's
    code. ``current_folder`` has those that asked for it.
    """

    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    current_folder: list[str] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what code reads within the block."""
        environment = type(os.environ)
        plain_open, plain_read = builtins.open, environment.__getitem__
        plain_stat, is_noting = os.stat, False
        plain_folder, plain_size = os.getcwd, os.path.getsize
        plain_list, plain_scan = os.listdir, os.scandir

        def noting_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if _WRITES.isdisjoint(mode):
                self._note(self.files, file)
            return plain_open(file, mode, *args, **kwargs)

        def noting_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:  # noqa: ANN401
            nonlocal is_noting
            # To find the user's line asks for paths, too.
            if not is_noting:
                is_noting = True
                try:
                    self._note(self.paths, path)
                finally:
                    is_noting = False
            return plain_stat(path, *args, **kwargs)

        def noting_size(path: Any) -> int:  # noqa: ANN401
            self._note(self.files, path)
            return plain_size(path)

        def noting_list(path: Any = ".") -> Any:  # noqa: ANN401
            self._note(self.folders, path)
            return plain_list(path)

        def noting_scan(path: Any = ".") -> Any:  # noqa: ANN401
            self._note(self.folders, path)
            return plain_scan(path)

        def noting_folder() -> str:
            # Libraries ask for it, too.
            if is_users_file(sys._getframe(1).f_code.co_filename):
                self.current_folder.append(line_of_call())
            return plain_folder()

        def noting_read(variables: Any, name: Any) -> Any:  # noqa: ANN401
            line = line_of_call()
            if line and isinstance(name, str):
                self.variables.setdefault(name, line)
            return plain_read(variables, name)

        with (
            mock.patch.object(builtins, "open", noting_open),
            mock.patch.object(io, "open", noting_open),
            mock.patch.object(os, "stat", noting_stat),
            mock.patch.object(os, "listdir", noting_list),
            mock.patch.object(os, "scandir", noting_scan),
            mock.patch.object(os, "getcwd", noting_folder),
            mock.patch.object(os.path, "getsize", noting_size),
            mock.patch.object(environment, "__getitem__", noting_read),
        ):
            yield

    def _note(self, notes: dict[str, str], file: object) -> None:
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path, line = str(Path(os.fsdecode(file)).absolute()), line_of_call()
        if line and not path.endswith(_OF_CODE):
            notes.setdefault(path, line)


NOTHING_READ: Final = OutsideReads()


def state_of_file(path: str) -> tuple[int, ...] | None:
    """Return what tells quickly whether a file has changed; None where it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def names_in_folder(path: str) -> tuple[str, ...] | None:
    """Return the names of what is in a folder, sorted; None where it cannot be read."""
    try:
        return tuple(sorted(each.name for each in Path(path).iterdir()))
    except OSError:
        return None


def contents_of_file(path: str) -> str:
    """Return a short text that differs where the contents of a file do."""
    state = state_of_file(path)
    if state is None:
        return "missing"
    if state[1] > _LARGE:
        return f"{state[1]} bytes of {state[0]}"
    return f"{zlib.crc32(Path(path).read_bytes()):08x}"
