"""Reports of training: printed, in a progress line on a terminal, in a file of JSON lines, and for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from zeroir.runtime.training.checkpoint_schedule import SaveReport
from zeroir.runtime.training.evaluations import EvaluationReport
from zeroir.runtime.training.train import AnyReport, Report, StepReport


class _TrainingConsole(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the caller can end training; rich would exit at once."""
        raise BrokenPipeError


@contextmanager
def reporter(
    rank: int,
    steps: int,
    *,
    steps_done: int,
    as_json: bool,
    out: TextIO,
    err: TextIO,
    log: Path | None = None,
    tensorboard: Path | None = None,
) -> Iterator[Report]:
    """Yield a function that reports for one rank; only rank 0 reports.

    It prints, appends JSON objects to the file ``log``, and writes scalars to TensorBoard's files in a folder, where
    those of earlier runs from step ``steps_done`` on are discarded.
    """
    if rank != 0:
        yield lambda _: None
        return
    with ExitStack() as stack:
        reports: list[Report] = []
        if as_json:
            reports.append(partial(_print_json, out))
        else:
            lines = _TrainingConsole(file=out, highlight=False, soft_wrap=True)
            console = Console(file=err, highlight=False)
            reports.append(stack.enter_context(_text_reports(lines, console, steps, steps_done)))
        if log is not None:
            file = stack.enter_context(log.open("a", encoding="utf-8"))
            reports.append(partial(_print_json, file))
        if tensorboard is not None:
            writer = _summary_writer(tensorboard, steps_done + 1)
            stack.callback(writer.close)
            reports.append(partial(_add_scalars, writer))

        def report_to_all(report: AnyReport) -> None:
            for receive in reports:
                receive(report)

        yield report_to_all


def _print_json(out: TextIO, report: AnyReport) -> None:
    """Write one JSON object on a line."""
    out.write(json.dumps(_facts(report)) + "\n")
    out.flush()


class _SummaryWriter(Protocol):
    """The methods of a TensorBoard writer that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Add one number of a step."""
        ...

    def flush(self) -> object:
        """Write what was added."""
        ...

    def close(self) -> object:
        """Close the file."""
        ...


def _summary_writer(folder: Path, first_step: int) -> _SummaryWriter:
    name = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
    make = cast("Callable[..., _SummaryWriter]", import_module(name).SummaryWriter)
    return make(str(folder), purge_step=first_step)


def _add_scalars(writer: _SummaryWriter, report: AnyReport) -> None:
    if isinstance(report, SaveReport):
        return
    for name, value in _facts(report).items():
        if isinstance(value, bool | float | int) and name != "step":
            writer.add_scalar(name, float(value), report.step)
    writer.flush()


def _facts(report: AnyReport) -> dict[str, object]:
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
        **({} if report.loss_scale is None else {"loss_scale": report.loss_scale}),
        "is_skipped": report.is_skipped,
        "grad_norm": report.grad_norm,
        "seconds_per_step": round(report.seconds, 6),
        "remaining_seconds": round(report.remaining_s, 3),
        f"{report.unit}_per_second": round(report.per_second, 1),
        **({} if report.mfu is None else {"mfu": round(report.mfu, 6)}),
        "memory_bytes": report.memory_bytes,
    }


@contextmanager
def _text_reports(out: Console, err: Console, steps: int, steps_done: int) -> Iterator[Report]:
    """Print one line per report on ``out``, and a progress line on ``err`` where that is a terminal.

    Where both are terminals, the lines go to ``err``, above the progress line.
    """
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[present]}", markup=False),
        TextColumn("{task.fields[remaining]}", markup=False),
        console=err,
        transient=True,
    )
    task = bar.add_task("training", total=steps, completed=steps_done, present="", remaining="")
    # While the progress line is shown, only its own console knows the position of the cursor.
    lines = err if err.is_terminal and out.is_terminal else out

    def show(report: AnyReport) -> None:
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
        scale = "" if report.loss_scale is None else f"  scale {report.loss_scale:g}"
        rates = _rates(report)
        lines.print(
            f"step {report.step:>5}  loss {report.loss:.4f}{lr}{scale}{norm}  {rates}{skipped}",
            markup=False,
        )
        bar.update(
            task,
            completed=report.step,
            present=f"loss {report.loss:.4f}  {rates}",
            remaining=f"{timedelta(seconds=round(report.remaining_s))} left",
        )

    with bar if err.is_terminal else nullcontext():
        yield show


def _rates(report: StepReport) -> str:
    """Return the time and memory of a step, and its throughput, as text."""
    mfu = "" if report.mfu is None else f"  MFU {report.mfu:.1%}"
    return (
        f"{report.seconds * 1000:.0f} ms  {report.per_second:,.0f} {report.unit}/s{mfu}  "
        f"{report.memory_bytes / 1e9:.2f} GB"
    )
