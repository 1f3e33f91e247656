"""Messages to the user on stderr, one sentence a line.

A command prints its messages. The functions that scripts call log theirs to the logger ``zeroir``, which has no handler
of its own, so a script shows them as its logging is configured.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TextIO

from zeroir.errors import (
    CheckpointWarning,
    GraphWarning,
    KernelWarning,
    ModelWarning,
    OffloadWarning,
    leave_reason,
    printable,
)

LOGGER: Final = logging.getLogger("zeroir")

LogLevel = Literal["debug", "info", "warning", "error"]

_OWN = (CheckpointWarning, GraphWarning, KernelWarning, ModelWarning, OffloadWarning)


def say(sentence: str) -> None:
    """Print a sentence to stderr."""
    sys.stderr.write(printable(sentence) + "\n")


def say_reason(sentence: str) -> None:
    """Print why this process ends, and record it for torchrun's summary."""
    say(sentence)
    leave_reason(sentence)


def show_log(level: LogLevel, rank: str) -> None:
    """Print log records of all libraries from this level on to stderr, with the rank, the level and the logger."""
    form = f"rank {rank} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)


class _Sentences(logging.Handler):
    """Prints zeroir's log records as a command prints its messages."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def notes_as_sentences() -> Iterator[None]:
    """Print zeroir's own log records as one sentence each."""
    if any(isinstance(handler, _Sentences) for handler in LOGGER.handlers):
        yield
        return
    handler, level, propagates = _Sentences(), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagates


@contextmanager
def warnings_as_sentences(*, is_silent: bool = False) -> Iterator[None]:
    """Print zeroir's own warnings and log records as one sentence each, without the line of code that issued them.

    With ``is_silent``, none of the warnings is printed.
    """
    with warnings.catch_warnings(), notes_as_sentences():
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
