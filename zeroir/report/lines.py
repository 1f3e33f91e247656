"""Tables without trailing blanks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

UNBOUNDED_WIDTH = 10_000
"""The width, in columns, at which nothing folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A table without the trailing blanks of rich; folded to the width of the console, or not at all."""

    table: Table
    is_foldable: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        if not self.is_foldable:
            options = options.update_width(UNBOUNDED_WIDTH)
        for line in console.render_lines(self.table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style, last.control))
            yield from line
            yield Segment.line()
