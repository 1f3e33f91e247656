"""Where the command line writes: answers to stdout, progress and errors to stderr."""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

_PIPE_WIDTH = 10_000
"""Rich takes a pipe for a terminal of 80 columns, in which tables fold; what reads a pipe wants one row a line."""


_PLAIN: Final = {"×": "x", "…": "...", "→": "->", "µ": "u", "≤": "<=", "−": "-", "⋮": ":", "·": "."}
"""What we print beyond ASCII, where the output has no such characters."""


def _degraded(error: UnicodeError) -> tuple[str, int]:
    """A character that the output cannot have, in ones that it can."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    said = error.object[error.start : error.end]
    plain = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in said)
    return "".join(plain), error.end


def accept_any_text() -> None:
    """Let stdout and stderr print every text, whatever their encoding: what it lacks is written in ASCII."""
    codecs.register_error("zeroir", _degraded)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="zeroir")


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
    """One JSON document on stdout, without colour; in ASCII where stdout is not in UTF-8."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=not is_utf8) + "\n")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on stderr while something long goes on; nothing where stderr is not a terminal."""
    if not err.is_terminal:
        yield
        return
    with err.status(what):
        yield
