"""The training loop of ``zeroir run``: take steps, report them, and stop on every rank alike."""

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
from typing import NoReturn, Protocol

from zeroir.errors import UserError
from zeroir.ir.program import InputBinding
from zeroir.runtime.batch import Batch
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.engine import Engine

_GRACE_S = 1.0


def give_way() -> None:
    """Let the rank that failed first end first: torchrun then ends this one, which has no news of its own to tell."""
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(_GRACE_S)


def abandon_job(exit_code: int) -> NoReturn:
    """End this process at once after a job that failed, once the reason is printed.

    An ordinary exit would wait, up to the timeout, for threads that are stuck in a collective with a lost peer.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step as every rank knows it.

    ``step`` counts from 1; ``loss`` is averaged over ranks; ``seconds`` is the mean time of the steps since the last
    report, ``per_second`` what all ranks together put through in it, in ``unit`` (tokens or samples).
    """

    step: int
    loss: float
    is_skipped: bool
    grad_norm: float | None
    seconds: float
    per_second: float
    unit: str


class Reporter(Protocol):
    """Who hears of the steps."""

    def step(self, report: StepReport) -> None:
        """A step was taken."""

    def close(self) -> None:
        """No more steps will be taken."""


MakeBatches = Callable[[int, int, int, int], Iterator[Batch]]
"""``batches(rank, world_size, seed, start_step)`` of a model file."""


def train(
    engine: Engine,
    batches: Iterator[Batch],
    *,
    steps: int,
    reporter: Reporter,
    log_every: int = 1,
) -> list[float]:
    """Take ``steps`` training steps and return their losses, averaged over ranks.

    Each step takes as many batches from the iterator as the program has micro-steps. The reporter hears of every
    ``log_every``-th step and of the last.

    Raises:
        UserError: on every rank, where the loss of any rank is no number; where batches fail, run out or do not fit.
    """
    micro_steps = int(engine.program.option.get("micro_steps", "1"))
    losses: list[float] = []
    numel, unit = throughput_unit(engine.program.inputs)
    since, start = 0, time.perf_counter()
    for step in range(1, steps + 1):
        result = engine.step([_next(batches, step) for _ in range(micro_steps)])
        loss = result.mean_loss
        if loss is None:
            loss = engine.average(result.loss)
        if not math.isfinite(loss) and not result.is_skipped:
            raise _loss_error(result.loss, loss, step)
        losses.append(loss)
        since += 1
        if step % log_every == 0 or step == steps:
            now = time.perf_counter()
            seconds = (now - start) / since
            reporter.step(
                StepReport(
                    step=step,
                    loss=loss,
                    is_skipped=result.is_skipped,
                    grad_norm=result.grad_norm,
                    seconds=seconds,
                    per_second=numel * micro_steps * engine.world_size / seconds,
                    unit=unit,
                )
            )
            since, start = 0, now
    return losses


def repeat_batch(batch: Callable[[], Batch]) -> Iterator[Batch]:
    """The example batch for ever: what a model file without ``batches`` is trained on."""
    example = batch()
    while True:
        yield example


def throughput_unit(inputs: tuple[InputBinding, ...]) -> tuple[int, str]:
    """How much one batch counts for: tokens where the first input is a matrix of integers, else samples."""
    if not inputs or not inputs[0].shape:
        return 1, "batches"
    first = inputs[0]
    if not first.dtype.is_floating and len(first.shape) == 2:
        return first.shape[0] * first.shape[1], "tokens"
    return first.shape[0], "samples"


def _loss_error(own: float, mean: float, step: int) -> UserError:
    """Why training stops, as this rank knows it."""
    if math.isfinite(own) and not math.isfinite(mean):
        return PeerError(
            f"The loss of another rank is no number at step {step}, their mean is {mean}."
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
    """An exception that the user's code raised, as one sentence with the line of that code."""
    # The frame below the caller's is the user's; deeper ones may be a library's.
    frames = traceback.extract_tb(error.__traceback__)[1:2]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    said = " ".join(str(error).split())
    reason = type(error).__name__ + (f": {said}" if said else "")
    return UserError(f"{what} failed{when}{place}: {reason}")
