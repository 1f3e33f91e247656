"""Results on the console and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from zeroir.report.render import (
    render_laws,
    render_passes,
    render_report,
    render_schedule,
    render_summary,
)
from zeroir.report.schedule import schedule
from zeroir.verify.explain import CODES

if TYPE_CHECKING:  # no command needs all of these imports
    from zeroir.api.check import Comparison
    from zeroir.ir.program import Program
    from zeroir.report.diff import DiffSummary
    from zeroir.report.passes import PassRow
    from zeroir.report.summary import Summary
    from zeroir.verify import Finding, Report

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_summary(out: Console, summary: Summary) -> None:
    """Print the summary of a program."""
    out.print(render_summary(summary))


def print_schedule(
    out: Console,
    program: Program,
    *,
    section: str | None,
    unit: str | None,
    is_unfolded: bool = False,
) -> None:
    """Print the schedule, with equal blocks folded unless ``is_unfolded``."""
    out.print(render_schedule(program, section=section, unit=unit, is_unfolded=is_unfolded))


def print_passes(out: Console, rows: Sequence[PassRow]) -> None:
    """Print the changes of each pass."""
    out.print(render_passes(rows))


def schedule_json(
    program: Program, *, section: str | None, unit: str | None
) -> dict[str, list[dict[str, object]]]:
    """The unfolded rows of each section."""
    return {
        each.name: [asdict(row) for row in schedule(program, each, unit=unit)]
        for each in program.sections
        if section in (None, each.name)
    }


def print_diff(out: Console, text: str) -> None:
    """Print a unified diff, coloured on a terminal."""
    for line in text.splitlines():
        out.print(Text(line, style=_DIFF_STYLES.get(line[:1], "")))


def print_diff_summary(out: Console, summary: DiffSummary) -> None:
    """Print the summary of a diff."""
    out.print(str(summary), markup=False)


def print_report(out: Console, report: Report) -> None:
    """Print every law with its verdict, and the findings."""
    out.print(render_report(report))


def report_json(report: Report) -> dict[str, object]:
    """The laws and the findings."""
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


def print_laws(out: Console) -> None:
    """Print every code with the errors that it rules out."""
    out.print(render_laws())


def law_json(code: str) -> dict[str, str]:
    """The code, title and remedy of a law."""
    law = CODES[code]
    return {"code": code, "title": law.title, "remedy": law.remedy}


def print_comparison(out: Console, comparison: Comparison) -> None:
    """Print whether the program equals the eager replicas, and the differences."""
    out.print(str(comparison), markup=False)
