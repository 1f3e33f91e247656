"""Tell the user something on stderr, one sentence a line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from zeroir.errors import (
    CheckpointWarning,
    GraphWarning,
    KernelWarning,
    ModelWarning,
    OffloadWarning,
)

_OWN = (CheckpointWarning, GraphWarning, KernelWarning, ModelWarning, OffloadWarning)


def say(sentence: str) -> None:
    """Print a sentence to stderr."""
    sys.stderr.write(sentence + "\n")


@contextmanager
def warnings_as_sentences(*, is_silent: bool = False) -> Iterator[None]:
    """Print zeroir's own warnings as one sentence each, without the line of code that issued them; or none of them."""
    with warnings.catch_warnings():
        for category in _OWN:
            warnings.simplefilter("ignore" if is_silent else "always", category)
        show_as_python = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, _OWN):
                say(f"Warning: {message}")
            else:
                show_as_python(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
