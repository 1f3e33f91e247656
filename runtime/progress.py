"""Reporters of training: a line of text or a JSON object per report, and a progress bar on a terminal."""

from __future__ import annotations

import json
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zeroir.runtime.train import Reporter, StepReport


class SilentReporter:
    """The reporter of ranks other than 0, which prints nothing."""

    def step(self, report: StepReport) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class JsonReporter:
    """Prints one JSON object per line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, report: StepReport) -> None:
        """Write one line."""
        facts = {
            "step": report.step,
            "loss": report.loss,
            "is_skipped": report.is_skipped,
            "grad_norm": report.grad_norm,
            "seconds_per_step": round(report.seconds, 6),
            f"{report.unit}_per_second": round(report.per_second, 1),
        }
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing to close."""


class _TrainingConsole(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the caller can end training; rich would exit at once."""
        raise BrokenPipeError


class TextReporter:
    """Prints one line per report on ``out``, and a progress bar on ``err`` where that is a terminal.

    Where both are terminals, the lines go to ``err``, above the bar.
    """

    def __init__(self, out: Console, err: Console, steps: int) -> None:
        self._out = out
        self._progress: Progress | None = None
        if err.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=err,
                transient=True,
            )
            self._task = self._progress.add_task("training", total=steps)
            self._progress.start()

    def step(self, report: StepReport) -> None:
        """Write one line and move the bar."""
        skipped = "  (skipped: overflow)" if report.is_skipped else ""
        norm = "" if report.grad_norm is None else f"  norm {report.grad_norm:.3g}"
        # While the bar is shown, only its own console knows the position of the cursor.
        is_beside_bar = self._progress is not None and self._out.is_terminal
        out = self._progress.console if self._progress and is_beside_bar else self._out
        out.print(
            f"step {report.step:>5}  loss {report.loss:.4f}{norm}  {report.seconds * 1000:.0f} ms  "
            f"{report.per_second:,.0f} {report.unit}/s{skipped}",
            markup=False,
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()


def reporter(rank: int, steps: int, *, as_json: bool, out: TextIO, err: TextIO) -> Reporter:
    """The reporter of one rank; only rank 0 prints."""
    if rank != 0:
        return SilentReporter()
    if as_json:
        return JsonReporter(out)
    return TextReporter(
        _TrainingConsole(file=out, highlight=False, soft_wrap=True),
        Console(file=err, highlight=False),
        steps,
    )
