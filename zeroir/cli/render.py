"""Answers on the console, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.syntax import Syntax

from zeroir.api.check import Comparison
from zeroir.ir.diff import DiffSummary
from zeroir.ir.program import Program
from zeroir.ir.verify import Report
from zeroir.report.render import render_report, render_schedule, render_summary
from zeroir.report.schedule import schedule
from zeroir.report.summary import Summary


def print_summary(out: Console, summary: Summary) -> None:
    """Print what a program is."""
    out.print(render_summary(summary))


def print_schedule(
    out: Console, program: Program, *, section: str | None, unit: str | None
) -> None:
    """Print the folded schedule."""
    out.print(render_schedule(program, section=section, unit=unit))


def schedule_json(
    program: Program, *, section: str | None, unit: str | None
) -> dict[str, list[dict[str, object]]]:
    """The unfolded rows of each section."""
    return {
        one.name: [asdict(row) for row in schedule(program, one, unit=unit)]
        for one in program.sections
        if section in (None, one.name)
    }


def print_diff(out: Console, text: str, summary: DiffSummary) -> None:
    """Print a unified diff, coloured on a terminal, and what it amounts to."""
    if text:
        if out.is_terminal:
            out.print(Syntax(text, "diff", background_color="default"))
        else:
            out.out(text, end="")
    out.print(str(summary), markup=False)


def print_report(out: Console, report: Report) -> None:
    """Print every law with its verdict, and the findings."""
    out.print(render_report(report))


def report_json(report: Report) -> dict[str, object]:
    """The laws and the findings."""
    return {
        "is_valid": report.is_valid,
        "laws": dict(report.laws),
        "findings": [
            {"code": finding.code, "sentence": finding.sentence, "text": finding.render()}
            for finding in report.findings
        ],
    }


def print_comparison(out: Console, comparison: Comparison) -> None:
    """Print whether the program computes what eager replicas compute, and where not."""
    out.print(str(comparison), markup=False)
