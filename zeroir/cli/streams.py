"""Standard streams that a caller closed, or that cannot be written, must not change how a command ends."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Take what is closed for /dev/null, and stderr for one that loses what cannot be written.

    Else the next file that is opened would be stdout, and a sentence for a full disk a traceback.
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
        io.BufferedWriter(_Lossy(2, "wb", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Lossy(io.FileIO):
    """A file whose errors nobody can be told."""

    def write(self, data: object, /) -> int:
        """Write the bytes, or lose them."""
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return super().write(view) or view.nbytes
        except OSError:
            return view.nbytes
