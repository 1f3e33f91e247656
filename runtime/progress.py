"""Reports of training: a line of text or a JSON object each, and a progress bar on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zeroir.runtime.evaluations import EvaluationReport
from zeroir.runtime.saves import SaveReport
from zeroir.runtime.train import Report, StepReport


class _TrainingConsole(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the caller can end training; rich would exit at once."""
        raise BrokenPipeError


@contextmanager
def reporter(rank: int, steps: int, *, as_json: bool, out: TextIO, err: TextIO) -> Iterator[Report]:
    """A function that prints the reports of one rank; only rank 0 prints."""
    if rank != 0:
        yield lambda _: None
    elif as_json:
        yield partial(_print_json, out)
    else:
        lines = _TrainingConsole(file=out, highlight=False, soft_wrap=True)
        with _text_reports(lines, Console(file=err, highlight=False), steps) as report:
            yield report


def _print_json(out: TextIO, report: StepReport | EvaluationReport | SaveReport) -> None:
    """Write one JSON object on a line."""
    out.write(json.dumps(_facts(report)) + "\n")
    out.flush()


def _facts(report: StepReport | EvaluationReport | SaveReport) -> dict[str, object]:
    if isinstance(report, SaveReport):
        return {"step": report.step, "saved": report.path}
    if isinstance(report, EvaluationReport):
        return {
            "step": report.step,
            "eval_loss": report.loss,
            "eval_batches": report.batches,
            "eval_seconds": round(report.seconds, 6),
        }
    return {
        "step": report.step,
        "loss": report.loss,
        **({} if report.lr is None else {"lr": report.lr}),
        "is_skipped": report.is_skipped,
        "grad_norm": report.grad_norm,
        "seconds_per_step": round(report.seconds, 6),
        f"{report.unit}_per_second": round(report.per_second, 1),
    }


@contextmanager
def _text_reports(out: Console, err: Console, steps: int) -> Iterator[Report]:
    """Print one line per report on ``out``, and a progress bar on ``err`` where that is a terminal.

    Where both are terminals, the lines go to ``err``, above the bar.
    """
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    task = bar.add_task("training", total=steps)
    # While the bar is shown, only its own console knows the position of the cursor.
    lines = err if err.is_terminal and out.is_terminal else out

    def show(report: StepReport | EvaluationReport | SaveReport) -> None:
        if isinstance(report, EvaluationReport):
            lines.print(
                f"step {report.step:>5}  eval loss {report.loss:.4f}  {report.batches} batches per rank  "
                f"{report.seconds * 1000:.0f} ms",
                markup=False,
            )
            return
        if isinstance(report, SaveReport):
            lines.print(f"step {report.step:>5}  saved {report.path}", markup=False)
            return
        skipped = "  (skipped: overflow)" if report.is_skipped else ""
        norm = "" if report.grad_norm is None else f"  norm {report.grad_norm:.3g}"
        lr = "" if report.lr is None else f"  lr {report.lr:.3e}"
        lines.print(
            f"step {report.step:>5}  loss {report.loss:.4f}{lr}{norm}  {report.seconds * 1000:.0f} ms  "
            f"{report.per_second:,.0f} {report.unit}/s{skipped}",
            markup=False,
        )
        bar.update(task, completed=report.step)

    with bar if err.is_terminal else nullcontext():
        yield show
