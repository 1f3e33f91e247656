"""The training loop of ``zeroir run``: it takes steps, reports them, and stops on all ranks together."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from zeroir.errors import UserError
from zeroir.ir.program import InputBinding
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.engine import Engine
from zeroir.runtime.evaluations import EvaluationReport, Evaluations, evaluate
from zeroir.torch_ops.batches import Batch

_GRACE_S = 1.0


def give_way() -> None:
    """Wait until the rank that failed first has ended: torchrun then ends this one, which has nothing to add."""
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(_GRACE_S)


def abandon_job(exit_code: int) -> NoReturn:
    """End this process at once after a failed job; the reason has been printed.

    An ordinary exit would wait, up to the timeout, for threads that hang in a collective with a lost peer.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step; the values are the same on every rank, except for times.

    ``step`` counts from 1; ``loss`` is averaged over ranks; ``lr`` is the learning rate that a schedule gave
    the step (its first optimizer group); ``seconds`` is the mean time of the steps since the last
    report; ``per_second`` is the throughput of all ranks together, in ``unit`` (tokens or samples).
    """

    step: int
    loss: float
    lr: float | None
    is_skipped: bool
    grad_norm: float | None
    seconds: float
    per_second: float
    unit: str


Report = Callable[[StepReport | EvaluationReport], None]
"""Receives the report of a step or of an evaluation."""


def train(
    engine: Engine,
    batches: Iterator[Batch],
    *,
    steps: int,
    report: Report,
    log_every: int = 1,
    micro_steps: int | None = None,
    evaluations: Evaluations | None = None,
) -> list[float]:
    """Take ``steps`` training steps and return their losses, averaged over ranks.

    Each step takes ``micro_steps`` batches from the iterator, by default as many as the program was compiled with, and
    the settings of the program's schedule. ``report`` receives every ``log_every``-th step and the last, and each of
    the evaluations.

    Raises:
        UserError: on every rank, where the loss of any rank is not finite; where the batches fail, end or do not fit.
    """
    if micro_steps is None:
        micro_steps = int(engine.program.option.get("micro_steps", "1"))
    is_scheduled = "schedule" in engine.program.option
    scheduler = engine.scheduler(steps) if is_scheduled else None
    losses: list[float] = []
    numel, unit = throughput_unit(engine.program.inputs)
    unreported, start = 0, time.perf_counter()
    for step in range(1, steps + 1):
        lr = None if scheduler is None else scheduler.lr
        result = engine.step([_next(batches, step) for _ in range(micro_steps)])
        loss = engine.mean_loss(result)
        if not math.isfinite(loss) and not result.is_skipped:
            raise _loss_error(result.loss, loss, step)
        losses.append(loss)
        if scheduler is not None:
            scheduler.step(is_skipped=result.is_skipped)
        unreported += 1
        if step % log_every == 0 or step == steps:
            now = time.perf_counter()
            seconds = (now - start) / unreported
            report(
                StepReport(
                    step=step,
                    loss=loss,
                    lr=lr,
                    is_skipped=result.is_skipped,
                    grad_norm=result.grad_norm,
                    seconds=seconds,
                    per_second=numel * micro_steps * engine.world_size / seconds,
                    unit=unit,
                )
            )
            unreported, start = 0, now
        if evaluations is not None and evaluations.is_due(step, steps):
            evaluation = evaluate(engine, evaluations, step)
            report(evaluation)
            start += evaluation.seconds
    return losses


def repeat_batch(batch: Callable[[], Batch]) -> Iterator[Batch]:
    """The example batch, repeated without end: the data of a model file without ``batches``."""
    example = batch()
    while True:
        yield example


def throughput_unit(inputs: tuple[InputBinding, ...]) -> tuple[int, str]:
    """The size of one batch and its unit: tokens where the first input is a matrix of integers, otherwise samples."""
    if not inputs or not inputs[0].shape:
        return 1, "batches"
    first = inputs[0]
    if not first.dtype.is_floating and len(first.shape) == 2:
        return first.shape[0] * first.shape[1], "tokens"
    return first.shape[0], "samples"


def _loss_error(own: float, mean: float, step: int) -> UserError:
    """The reason that training stops, as this rank knows it."""
    if math.isfinite(own) and not math.isfinite(mean):
        return PeerError(
            f"The loss of another rank is not finite at step {step}; the mean over ranks is {mean}."
        )
    return UserError(
        f"The loss is {own} at step {step}: lower the learning rate, clip gradients (--clip), or look "
        "for values in the data that the model cannot take."
    )


def _next(batches: Iterator[Batch], step: int) -> Batch:
    try:
        return next(batches)
    except StopIteration:
        raise UserError(
            f"batches() ended before step {step}: yield for ever, or ask for fewer --steps."
        ) from None
    except (Exception, SystemExit) as error:
        raise model_error("batches()", error, f" at step {step}") from error


def model_error(what: str, error: BaseException, when: str = "") -> UserError:
    """An error of one sentence for an exception in the user's code, with the line of that code."""
    # The frame below the caller's is the user's; deeper frames may belong to a library.
    frames = traceback.extract_tb(error.__traceback__)[1:2]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    message = " ".join(str(error).split())
    reason = type(error).__name__ + (f": {message}" if message else "")
    return UserError(f"{what} failed{when}{place}: {reason}")
