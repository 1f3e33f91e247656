"""Programs and proofs as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from zeroir.ir.explain import CODES
from zeroir.ir.memory import COLLECTIVE_KEYS
from zeroir.ir.program import Program, Section
from zeroir.ir.verify import PROVED, Report
from zeroir.report.names import counted, format_bytes, format_flops, shortened
from zeroir.report.schedule import Fold, Row, fold, schedule
from zeroir.report.summary import Summary

UNBOUNDED_WIDTH = 10_000
"""The width, in columns, at which nothing folds."""

_STREAM_STYLES = {"compute": "green", "gather": "cyan", "reduce": "magenta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """A table without the blanks that rich puts after each line; as wide as it is, or folded to the console."""

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


def render_text(summary: Summary, program: Program) -> str:
    """The summary and the schedule without colour, as wide as they are."""
    sink = StringIO()
    console = Console(file=sink, width=UNBOUNDED_WIDTH, no_color=True, highlight=False)
    console.print(Group(render_summary(summary), render_schedule(program)))
    return sink.getvalue().rstrip()


def render_summary(summary: Summary) -> RenderableType:
    """What the program is, what it holds and what it sends."""
    mesh = " ".join(f"{name}={size}" for name, size in summary["mesh"].items())
    units = summary["units"]
    states = summary["model_state_bytes_per_rank"]
    peak = summary["peak_bytes_per_rank"]
    traffic = summary["collective_bytes"]
    broken = [code for code, verdict in summary["laws"].items() if verdict != PROVED]
    laws = f"{len(summary['laws'])} proved" if not broken else f"broken: {', '.join(broken)}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("program", f"stage {summary['stage']}, {summary['precision']}, mesh {mesh}")
    grid.add_row(
        "parameters",
        f"{summary['parameters_numel']:,} in {counted(len(units), 'unit')}: {' '.join(shortened(units))}",
    )
    grid.add_row("segments", f"{summary['distinct_segments']} distinct")
    grid.add_row(
        "sections",
        ", ".join(f"{name} ({counted(ops, 'op')})" for name, ops in summary["sections"].items()),
    )
    grid.add_row("model states", f"{_amounts(states)} per rank")
    grid.add_row("peak buffers", f"{_amounts(peak)} per rank")
    grid.add_row("on the wire", f"{_amounts(traffic)} per step")
    for axis, own in summary["collective_bytes_by_axis"].items():
        if len(summary["mesh"]) > 1:
            grid.add_row(f"… over {axis}", f"{_amounts(own)} per step")
    grid.add_row("laws", Text(laws, style="red" if broken else "green"))
    return _Lines(table=grid, is_foldable=True)


def _amounts(amounts: dict[str, int]) -> str:
    present = {name: count for name, count in amounts.items() if count}
    total = format_bytes(sum(present.values()))
    parts = [f"{name} {format_bytes(count)}" for name, count in present.items()]
    shown = parts if len(parts) <= len(COLLECTIVE_KEYS) else [*parts[:3], "…"]
    return f"{total} ({', '.join(shown)})" if parts else total


def render_schedule(
    program: Program, *, section: str | None = None, unit: str | None = None
) -> RenderableType:
    """One table a section, equal blocks folded."""
    chosen = [one for one in program.sections if section in (None, one.name)]
    tables = (_table(program, one, unit) for one in chosen)
    return Group(*(_Lines(table=table, is_foldable=False) for table in tables))


def _table(program: Program, section: Section, unit: str | None) -> Table:
    table = Table(
        title=f"\n{section.name}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("line", justify="right", style="dim")
    table.add_column("stream")
    table.add_column("op")
    table.add_column("unit")
    table.add_column("what")
    table.add_column("size", justify="right")
    for item in fold(schedule(program, section, unit=unit)):
        if isinstance(item, Fold):
            table.add_row(*_folded(item), style="dim italic")
            continue
        stream = Text(item.stream, style=_STREAM_STYLES.get(item.stream, "yellow"))
        units = ", ".join(item.units)
        table.add_row(str(item.line), stream, item.op, units, item.detail, _size(item))
    return table


def _folded(item: Fold) -> tuple[str, str, str, str, str]:
    """Line, stream, op, unit and what."""
    units = " … ".join(dict.fromkeys([*item.units[:1], *item.units[-1:]]))
    return "⋮", "", counted(item.period, "op"), units, f"the same, {item.repeats} more times"


def _size(row: Row) -> str:
    if row.payload_bytes:
        return format_bytes(row.payload_bytes)
    return format_flops(row.flops) if row.flops else ""


def render_report(report: Report) -> RenderableType:
    """Every law with its verdict, and the findings in full."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("law")
    table.add_column("rules out")
    table.add_column("verdict")
    for code, verdict in report.laws.items():
        style = "green" if verdict == PROVED else "red"
        table.add_row(code, CODES[code].title, Text(verdict, style=style))
    findings = [Text(f"\n{finding.render()}") for finding in report.findings]
    return Group(_Lines(table=table, is_foldable=True), *findings)


def render_laws() -> RenderableType:
    """Every code with what it rules out."""
    table = Table.grid(padding=(0, 2))
    for code, law in CODES.items():
        table.add_row(code, law.title)
    return _Lines(table=table, is_foldable=True)
