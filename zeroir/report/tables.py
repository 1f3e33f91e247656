"""Terminal tables: facts line by line, columns under a title, without trailing spaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

UNBOUNDED_WIDTH = 10_000
"""The width, in columns, at which nothing is wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A table without rich's trailing spaces; wrapped to the width of the console, or not at all."""

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


def facts_table() -> Table:
    """Return an empty table of two columns: the name of a fact, and the fact."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def columns_table(*columns: str, figures: Collection[str] = (), title: str = "") -> Table:
    """Return an empty table with these columns; those of figures are right-aligned."""
    table = Table(
        title=Text(f"\n{title}", style="bold") if title else None,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        table.add_column(column, justify="right" if column in figures else "left", overflow="fold")
    return table
