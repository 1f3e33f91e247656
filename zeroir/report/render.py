"""Programs, proofs and diffs as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeroir.ir.analysis.traffic import COLLECTIVE_KEYS, on_the_wire
from zeroir.ir.buffers import Space
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program, Section
from zeroir.ir.text.html import facts_html
from zeroir.report.names import counted, format_flops, shortened
from zeroir.report.opaque_code import lines_of, traced_units
from zeroir.report.schedule import Fold, Row, fold, schedule
from zeroir.report.summary import Summary, TemporaryBytes, counted_step
from zeroir.report.tables import UNBOUNDED_WIDTH, Lines, columns_table, facts_table
from zeroir.verify import PROVED, Finding, Report
from zeroir.verify.laws import CODES

if TYPE_CHECKING:  # passes are slow to load
    from zeroir.report.passes import PassRow

_STREAM_STYLES = {"compute": "green", "gather": "cyan", "reduce": "magenta"}
_OP_STYLES = {
    "compute": "bold",
    "prefetch": "bold cyan",
    "all_gather": "cyan",
    "reduce_scatter": "magenta",
    "all_reduce": "magenta",
    "broadcast": "cyan",
    "optimizer_step": "bold yellow",
    "release": "dim",
}
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def render_text(summary: Summary, program: Program) -> str:
    """Return the summary and the schedule as text without colours or wrapped lines."""
    sink = StringIO()
    console = Console(file=sink, width=UNBOUNDED_WIDTH, no_color=True, highlight=False)
    console.print(Group(render_summary(summary), render_schedule(program)))
    return sink.getvalue().rstrip()


def render_summary(summary: Summary) -> RenderableType:
    """Render the options, the memory and the communication of the program."""
    grid = facts_table()
    for name, fact in _facts(summary):
        grid.add_row(name, fact)
    return Lines(table=grid, is_foldable=True)


def summary_html(summary: Summary) -> str:
    """Render the same as a table of a notebook."""
    return facts_html((name, str(fact)) for name, fact in _facts(summary))


def _facts(summary: Summary) -> Iterator[tuple[str, str | Text]]:
    mesh = " ".join(f"{name}={size}" for name, size in summary["mesh"].items())
    units = summary["units"]
    states = summary["model_state_bytes_per_rank"]
    peak = summary["peak_bytes_per_rank"]
    temporary = summary["temporary_bytes_per_rank"]
    traffic = on_the_wire(summary["collective_bytes"])
    broken = [code for code, verdict in summary["laws"].items() if verdict != PROVED]
    laws = f"{len(summary['laws'])} proved" if not broken else f"broken: {', '.join(broken)}"
    device = "" if summary["device"] is None else f", captured for {summary['device']}"
    yield "program", f"stage {summary['stage']}, {summary['precision']}, mesh {mesh}{device}"
    yield (
        "parameters",
        f"{summary['parameters_numel']:,} in {counted(len(units), 'unit')}: {' '.join(shortened(units))}",
    )
    if summary["dims"]:
        ranges = [f"{name} {low} to {high}" for name, (low, high) in summary["dims"].items()]
        yield "batches", f"of any {', '.join(ranges)}; figures are for the largest"
    if summary["weight"] is not None:
        yield "weight", summary["weight"]
    if summary["stored_bytes"]:
        stored = [f"{path} {format_bytes(size)}" for path, size in summary["stored_bytes"].items()]
        yield "stored", Text(f"{', '.join(shortened(stored))} per batch, by the model's code")
    for code in summary["opaque"]:
        yield "runs as it is", Text("\n".join(lines_of(code)))
    if summary["opaque"]:
        traced = traced_units(units, summary["opaque"])
        yield "traced", " ".join(shortened(traced)) or "no unit as a whole"
    yield "segments", f"{summary['distinct_segments']} distinct"
    yield (
        "sections",
        ", ".join(f"{name} ({counted(ops, 'op')})" for name, ops in summary["sections"].items()),
    )
    yield "model states", f"{_amounts(states)} per rank"
    yield "peak buffers", f"{_amounts(peak)} per rank"
    if temporary["live"]:
        yield "temporary", f"one block of {format_bytes(temporary['block'])}, {_gap(temporary)}"
    per_step = f"per {counted_step(summary)}"
    yield "on the wire", f"{_amounts(traffic)} {per_step}"
    for axis, own in summary["collective_bytes_by_axis"].items():
        if len(summary["mesh"]) > 1:
            yield f"… over {axis}", f"{_amounts(on_the_wire(own))} {per_step}"
    if any(summary["transfer_bytes"].values()):
        for space, outside in summary["outside_bytes_per_rank"].items():
            if outside["resting"] or outside["block"]:
                kept = {**outside["resting"], "temporary": outside["block"]}
                pinned = ", pinned beside a GPU" if space == Space.HOST else ""
                yield f"on the {space}", f"{_amounts(kept)} per rank{pinned}"
        if summary["staging_bytes_per_rank"]:
            yield (
                "staging",
                f"{_amounts(summary['staging_bytes_per_rank'])} per rank, at most at once",
            )
        yield "transfers", f"{_amounts(summary['transfer_bytes'])} per rank, {per_step}"
    evaluation = summary["evaluation"]
    if evaluation is not None:
        most = sum(evaluation["peak_bytes_per_rank"].values())
        sent = sum(on_the_wire(evaluation["collective_bytes"]).values())
        yield (
            "evaluation",
            f"peak buffers {format_bytes(most)} per rank, {format_bytes(sent)} on the wire",
        )
    if summary["snapshot_bytes_per_rank"]:
        size = format_bytes(summary["snapshot_bytes_per_rank"])
        yield "saving", f"{size} of the host's memory per rank, from the first save on"
    if summary["bounds"]:
        yield "bounds", ", ".join(summary["bounds"])
    yield "laws", Text(laws, style="red" if broken else "green")


def _gap(temporary: TemporaryBytes) -> str:
    if temporary["block"] == temporary["live"]:
        return "equal to the most bytes live at once"
    return f"{temporary['block'] / temporary['live'] - 1:.2%} more than the most bytes live at once"


def _amounts(amounts: Mapping[str, int]) -> str:
    present = {name: count for name, count in amounts.items() if count}
    total = format_bytes(sum(present.values()))
    parts = [f"{name} {format_bytes(count)}" for name, count in present.items()]
    shown = parts if len(parts) <= len(COLLECTIVE_KEYS) else [*parts[:3], "…"]
    return f"{total} ({', '.join(shown)})" if parts else total


def render_schedule(
    program: Program,
    *,
    section: str | None = None,
    unit: str | None = None,
    is_unfolded: bool = False,
) -> RenderableType:
    """Render one table for each section; equal blocks are folded unless ``is_unfolded``."""
    tables = (
        _table(program, shown, unit, is_unfolded)
        for shown in program.sections
        if section in (None, shown.name)
    )
    return Group(*(Lines(table=table, is_foldable=False) for table in tables))


def _table(program: Program, section: Section, unit: str | None, is_unfolded: bool) -> Table:
    table = columns_table(
        *("line", "stream", "op", "unit", "what", "size"),
        figures=("line", "size"),
        title=section.name,
    )
    table.columns[0].style = "dim"
    rows = schedule(program, section, unit=unit)
    for item in rows if is_unfolded else fold(rows):
        if isinstance(item, Fold):
            table.add_row(*_folded(item), style="dim italic")
            continue
        stream = Text(item.stream, style=_STREAM_STYLES.get(item.stream, "yellow"))
        units = ", ".join(item.units)
        op = Text(item.op, style=_OP_STYLES.get(item.op, ""))
        table.add_row(str(item.line), stream, op, units, Text(item.detail), _size(item))
    return table


def _folded(item: Fold) -> tuple[str, str, str, str, str]:
    """Return the cells of a fold: line, stream, op, unit and what."""
    units = " … ".join(dict.fromkeys([*item.units[:1], *item.units[-1:]]))
    return "⋮", "", counted(item.period, "op"), units, f"the same, {item.repeats} more times"


def _size(row: Row) -> str:
    if row.payload_bytes:
        return format_bytes(row.payload_bytes)
    return format_flops(row.flops) if row.flops else ""


def schedule_json(
    program: Program, *, section: str | None, unit: str | None
) -> dict[str, list[dict[str, object]]]:
    """Return the unfolded rows of each section."""
    return {
        shown.name: [asdict(row) for row in schedule(program, shown, unit=unit)]
        for shown in program.sections
        if section in (None, shown.name)
    }


def render_passes(rows: Sequence[PassRow]) -> RenderableType:
    """Render the changes of each pass: ops added and removed, bytes on the wire, the peak of the buffers."""
    figures = ("pass", "ops", "on the wire", "peak buffers")
    table = columns_table(*figures, "what it is", "ops added and removed", figures=figures)
    table.columns[0].style = "dim"
    before: PassRow | None = None
    for row in rows:
        changes = Text(" ").join(
            [
                *(Text(f"+{count} {name}", style="green") for name, count in row.added.items()),
                *(Text(f"-{count} {name}", style="red") for name, count in row.removed.items()),
            ]
        )
        table.add_row(
            str(row.number),
            f"{row.ops:,}",
            _changed(row.wire_bytes, None if before is None else before.wire_bytes),
            _changed(row.peak_bytes, None if before is None else before.peak_bytes),
            Text(row.spec or "the logical program, on one device"),
            changes,
        )
        before = row
    return Lines(table=table, is_foldable=False)


def _changed(count: int, before: int | None) -> Text:
    """Render bytes: green if fewer than before, red if more, dim if equal."""
    if before is None or count == before:
        return Text(format_bytes(count), style="" if before is None else "dim")
    return Text(format_bytes(count), style="green" if count < before else "red")


def render_report(report: Report) -> RenderableType:
    """Render every law with its verdict, and the findings in full."""
    table = columns_table("law", "rules out", "verdict")
    broken = {finding.code for finding in report.findings}
    for code, verdict in report.laws.items():
        style = "green" if verdict == PROVED else "red"
        # The findings are below the table.
        shown = "broken" if code in broken else verdict
        table.add_row(code, CODES[code].title, Text(shown, style=style))
    findings = [Text(f"\n{finding.render()}") for finding in report.findings]
    return Group(Lines(table=table, is_foldable=True), *findings)


def report_json(report: Report) -> dict[str, object]:
    """Return the laws and the findings as plain data."""
    return {
        "is_valid": report.is_valid,
        "laws": dict(report.laws),
        "findings": [_finding_json(finding) for finding in report.findings],
    }


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "code": finding.code,
        "section": finding.section,
        "line": finding.line,
        "sentence": finding.sentence,
        "remedy": finding.remedy,
        "text": finding.render(),
    }


def render_laws() -> RenderableType:
    """Render every code with the title of its law."""
    table = Table.grid(padding=(0, 2))
    for code, law in CODES.items():
        table.add_row(code, law.title)
    return Lines(table=table, is_foldable=True)


def law_json(code: str) -> dict[str, str]:
    """Return the code, title and remedy of a law."""
    law = CODES[code]
    return {"code": code, "title": law.title, "remedy": law.remedy}


def render_diff(text: str) -> RenderableType:
    """Render a unified diff with coloured lines."""
    return Group(*(Text(line, style=_DIFF_STYLES.get(line[:1], "")) for line in text.splitlines()))
