"""Programs and proofs as a person reads them in a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeroir.ir.program import Program, Section
from zeroir.ir.verify import Report
from zeroir.report.names import format_bytes
from zeroir.report.schedule import Fold, Row, fold, schedule
from zeroir.report.summary import Summary

_STREAM_STYLES = {"compute": "green", "gather": "cyan", "reduce": "magenta"}


def render_text(summary: Summary, program: Program) -> str:
    """The summary and the schedule without colour, 110 columns wide."""
    sink = StringIO()
    console = Console(file=sink, width=110, no_color=True, highlight=False)
    console.print(render_summary(summary))
    console.print(render_schedule(program))
    return sink.getvalue().rstrip()


def render_summary(summary: Summary) -> RenderableType:
    """What the program is, what it holds and what it sends."""
    mesh = " ".join(f"{name}={size}" for name, size in summary["mesh"].items())
    units = summary["units"]
    shown = units if len(units) <= 6 else [*units[:3], "…", *units[-2:]]
    states = summary["model_state_bytes_per_rank"]
    traffic = summary["collective_bytes"]
    broken = [code for code, verdict in summary["laws"].items() if verdict != "proved"]
    laws = f"{len(summary['laws'])} proved" if not broken else f"broken: {', '.join(broken)}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("program", f"stage {summary['stage']}, {summary['precision']}, mesh {mesh}")
    grid.add_row(
        "parameters", f"{summary['parameters_numel']:,} in {len(units)} units: {' '.join(shown)}"
    )
    grid.add_row("segments", f"{summary['distinct_segments']} distinct")
    grid.add_row(
        "sections",
        ", ".join(f"{name} ({count} ops)" for name, count in summary["sections"].items()),
    )
    grid.add_row("model states", f"{_amounts(states)} per rank")
    grid.add_row("on the wire", f"{_amounts(traffic)} per step")
    grid.add_row("laws", Text(laws, style="red" if broken else "green"))
    return grid


def _amounts(amounts: dict[str, int]) -> str:
    present = {name: count for name, count in amounts.items() if count}
    total = format_bytes(sum(present.values()))
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in present.items())
    return f"{total} ({parts})" if parts else total


def render_schedule(
    program: Program, *, section: str | None = None, unit: str | None = None
) -> RenderableType:
    """One table a section, equal blocks folded."""
    chosen = [one for one in program.sections if section in (None, one.name)]
    return Group(*(_table(program, one, unit) for one in chosen))


def _table(program: Program, section: Section, unit: str | None) -> Table:
    table = Table(
        title=section.name, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("line", justify="right", style="dim")
    table.add_column("stream")
    table.add_column("op")
    table.add_column("unit")
    table.add_column("what", overflow="fold")
    table.add_column("size", justify="right")
    for item in fold(schedule(program, section, unit=unit)):
        if isinstance(item, Fold):
            table.add_row("⋮", "", Text(_folded(item), style="dim italic"), "", "", "")
            continue
        stream = Text(item.stream, style=_STREAM_STYLES.get(item.stream, "yellow"))
        table.add_row(str(item.line), stream, item.op, item.unit, item.detail, _size(item))
    return table


def _folded(item: Fold) -> str:
    ops = "op" if item.period == 1 else f"{item.period} ops"
    names = f" ({item.units[0]} … {item.units[-1]})" if len(item.units) > 1 else ""
    return f"the same {ops}, {item.repeats} more times{names}"


def _size(row: Row) -> str:
    if row.payload_bytes:
        return format_bytes(row.payload_bytes)
    return f"{row.flops / 1e6:,.1f} MFLOP" if row.flops else ""


def render_report(report: Report) -> RenderableType:
    """Every law with its verdict, and the findings in full."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("law")
    table.add_column("verdict", overflow="fold")
    for code, verdict in report.laws.items():
        table.add_row(code, Text(verdict, style="green" if verdict == "proved" else "red"))
    findings = [Text(f"\n{finding.render()}") for finding in report.findings]
    return Group(table, *findings)
