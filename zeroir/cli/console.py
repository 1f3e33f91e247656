"""Where the command line writes: answers to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_PIPE_WIDTH = 10_000
"""Rich takes a pipe for a terminal of 80 columns, in which tables fold; what reads a pipe wants one row a line."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, where rich would exit at once, with 1."""
        raise BrokenPipeError


def _console(*, is_stderr: bool) -> Console:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return _Console(stderr=is_stderr, highlight=False, soft_wrap=True, width=width, emoji=False)


out = _console(is_stderr=False)
err = _console(is_stderr=True)


def print_json(value: object) -> None:
    """One JSON document on stdout, without colour."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on stderr while something long goes on; nothing where stderr is not a terminal."""
    if not err.is_terminal:
        yield
        return
    with err.status(what):
        yield
