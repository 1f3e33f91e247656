"""Standard streams that are closed or cannot be written do not change the exit code of a command."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null in place of each closed stream, and let stderr ignore errors of writing.

    Otherwise the next opened file would become stdout, and a message on a full disk would end in a traceback.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one; the ranks that a command starts inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_IgnoringErrors(2, "wb", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _IgnoringErrors(io.FileIO):
    """A file that ignores errors of writing, since they cannot be reported."""

    def write(self, data: object, /) -> int:
        """Write the bytes; on an error, lose them."""
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return super().write(view) or view.nbytes
        except OSError:
            return view.nbytes
