"""The outputs of the command line: results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Final

from rich.console import (
    Console,
    ConsoleOptions,
    HighlighterType,
    JustifyMethod,
    OverflowMethod,
    RenderableType,
)
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from zeroir.errors import printable

_PIPE_WIDTH = 10_000
"""Rich assumes 80 columns for a pipe and would fold tables; readers of a pipe expect one row per line."""


_PLAIN: Final = {"×": "x", "…": "...", "→": "->", "µ": "u", "≤": "<=", "−": "-", "⋮": ":", "·": "."}
"""ASCII replacements for the other characters that commands print."""


def _ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement for characters that the output cannot encode, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unencodable = error.object[error.start : error.end]
    plain = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in unencodable)
    return "".join(plain), error.end


def accept_any_text() -> None:
    """Let stdout and stderr print every text: characters that their encoding lacks are written in ASCII."""
    codecs.register_error("zeroir", _ascii_replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="zeroir")


def shortened_words(text: str) -> str:
    """Return the text with very long words shortened in the middle, such as numbers of 1,000 digits."""
    return re.sub(r"\S{200,}", lambda word: f"{word[0][:60]}…{word[0][-20:]}", text)


class _Console(Console):
    """A console that prints texts of files as they are: neither as markup nor as commands to the terminal."""

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        emoji: bool | None = None,
        markup: bool | None = None,
        highlight: bool | None = None,
        highlighter: HighlighterType | None = None,
    ) -> Text:
        """Render a text as rich measures it and lays it out."""
        return super().render_str(
            printable(text),
            style=style,
            justify=justify,
            overflow=overflow,
            emoji=emoji,
            markup=markup,
            highlight=highlight,
            highlighter=highlighter,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render the parts of what is printed, also of texts that have a style already."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Raise the error for the command line to handle; rich would exit with 1."""
        raise BrokenPipeError


def _console(*, is_stderr: bool, pipe_width: int | None = _PIPE_WIDTH) -> Console:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() else pipe_width
    return _Console(
        stderr=is_stderr, highlight=False, soft_wrap=True, width=width, emoji=False, markup=False
    )


out = _console(is_stderr=False)
err = _console(is_stderr=True)
help_console = _console(is_stderr=False, pipe_width=None)
"""The console of ``--help``, whose lines are folded for a person to read in a pager, too."""


def print_json(value: object) -> None:
    """Print one JSON document on stdout, without colour; in ASCII where stdout is not in UTF-8."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=not is_utf8) + "\n")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show a spinner on stderr, if that is a terminal, while the body runs, whose own prints go to stderr, too."""
    with redirect_stdout(sys.stderr):
        if not err.is_terminal:
            yield
            return
        with err.status(what):
            yield
