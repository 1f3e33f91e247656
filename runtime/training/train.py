"""The training loop of ``zeroir run``: it runs steps, reports them, and stops on all ranks together."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from zeroir.config import options_of
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.program import InputBinding
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.device.driver import driver
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.results import StepResult
from zeroir.runtime.training.checkpoint_schedule import SaveReport, Saves
from zeroir.runtime.training.evaluations import EvaluationReport, Evaluations, evaluate
from zeroir.runtime.training.not_finite import bad_input
from zeroir.runtime.training.stop_signal import StopSignal
from zeroir.runtime.training.training_state import TrainingState
from zeroir.torch_ops.batches import Batch

_GRACE_S = 1.0


def wait_for_first_failure(noticed_s: float = 0.0) -> None:
    """Wait until the rank that failed first has ended: torchrun then ends this one, which has nothing to add.

    ``noticed_s`` are the seconds after which a heartbeat has noticed and reported the cause.
    """
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(noticed_s + _GRACE_S)


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

    ``step`` counts from 1; ``loss`` is averaged over ranks; ``lr`` is the learning rate that a schedule set for the
    step (in its first optimizer group); ``loss_scale`` is that of the next step, None without loss scaling. ``seconds``
    is the mean time of the steps since the last report, and ``remaining_s`` the time of the remaining steps at that
    rate; ``per_second`` is the throughput of all ranks together, in ``unit`` (tokens or samples). ``mfu`` is the
    fraction of the device's peak FLOP/s achieved, counting the model's own arithmetic without recomputation; None where
    the peak is unknown. ``memory_bytes`` is the peak memory of any rank so far: on a GPU the memory allocated by torch,
    elsewhere the memory of the process.
    """

    step: int
    loss: float
    lr: float | None
    loss_scale: float | None
    is_skipped: bool
    grad_norm: float | None
    seconds: float
    remaining_s: float
    per_second: float
    unit: str
    mfu: float | None
    memory_bytes: int


AnyReport = StepReport | EvaluationReport | SaveReport
Report = Callable[[AnyReport], None]
"""A function that receives the report of a step, an evaluation, or a checkpoint."""


def train(
    training: TrainingState,
    *,
    steps: int,
    report: Report,
    log_every: int = 1,
    micro_steps: int | None = None,
    evaluations: Evaluations | None = None,
    saves: Saves | None = None,
    stop: StopSignal | None = None,
    at_peak_s: float | None = None,
    check_finite: bool = False,
) -> list[float]:
    """Train until ``steps`` steps are done, and return the losses of those run here, averaged over ranks.

    Each step takes ``micro_steps`` batches of the data, by default as many as the program was compiled with, and the
    settings of the scheduler. ``report`` receives every ``log_every``-th step and the last, every evaluation, and every
    checkpoint. With ``stop`` training ends early, after a step and its checkpoint, where a rank is asked to.
    ``at_peak_s`` is the time that a device at its peak needs for the model's arithmetic of one micro-step. With
    ``check_finite`` a step ends before its update where a gradient is not finite, and the error names its parameter;
    the program's update must not overlap the backward.

    Raises:
        UserError: on every rank, where the loss of any rank is not finite, or with ``check_finite`` a gradient; where
            the batches fail, end or do not fit; where a checkpoint cannot be saved.
    """
    engine, scheduler = training.engine, training.scheduler
    if micro_steps is None:
        micro_steps = options_of(engine.program).micro_steps.count
    losses: list[float] = []
    numel, unit = throughput_unit(engine.program.inputs)
    has_scale = any(isinstance(op, ops.UpdateScale) for op in engine.program.ops())
    unreported, start = 0, time.perf_counter()
    for step in range(engine.step_count + 1, steps + 1):
        lr = None if scheduler is None else scheduler.lr
        batches = [training.data.take(step) for _ in range(micro_steps)]
        result = _checked_step(engine, batches) if check_finite else engine.step(batches)
        loss = result.mean_loss
        if not math.isfinite(loss) and not result.is_skipped:
            raise _loss_error(result.loss, loss, step, batches, is_checked=check_finite)
        losses.append(loss)
        if scheduler is not None:
            scheduler.step(is_skipped=result.is_skipped)
        is_last = step == steps or (stop is not None and is_stopping(engine, stop))
        unreported += 1
        if step % log_every == 0 or is_last:
            now = time.perf_counter()
            seconds = (now - start) / unreported
            report(
                StepReport(
                    step=step,
                    loss=loss,
                    lr=lr,
                    loss_scale=engine.loss_scale if has_scale else None,
                    is_skipped=result.is_skipped,
                    grad_norm=result.grad_norm,
                    seconds=seconds,
                    remaining_s=seconds * (steps - step),
                    per_second=numel * micro_steps * engine.world_size / seconds,
                    unit=unit,
                    mfu=None if at_peak_s is None else at_peak_s * micro_steps / seconds,
                    memory_bytes=_most_memory_bytes(engine),
                )
            )
            unreported, start = 0, now
        metrics = {"loss": loss}
        if evaluations is not None and evaluations.is_due(step, steps):
            evaluation = evaluate(engine, evaluations, step)
            metrics["eval_loss"] = evaluation.loss
            report(evaluation)
            start += evaluation.seconds
        if saves is not None:
            saves.after_step(step, metrics, is_last=is_last, report=report)
        if is_last:
            break
    return losses


def is_stopping(engine: Engine, stop: StopSignal) -> bool:
    """Return whether any rank was asked to end; all ranks call this together, and get the same answer."""
    is_any = engine.average(float(stop.is_sent)) > 0
    if is_any:
        stop.acknowledge()
    return is_any


def _most_memory_bytes(engine: Engine) -> int:
    """Return the peak memory of any rank so far. All ranks call this together."""
    if engine.device.type == "cuda":
        own = driver().peak_bytes(engine.device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(max(row[0] for row in engine.job.exchange([own])))


def throughput_unit(inputs: tuple[InputBinding, ...]) -> tuple[int, str]:
    """Return the size of one batch and its unit: tokens where the first input is an integer matrix, else samples."""
    if not inputs or not inputs[0].shape:
        return 1, "batches"
    first = inputs[0]
    if not first.dtype.is_floating and len(first.shape) == 2:
        return first.shape[0] * first.shape[1], "tokens"
    return first.shape[0], "samples"


def _loss_error(
    own: float, mean: float, step: int, batches: Sequence[Batch], *, is_checked: bool
) -> UserError:
    """Return the reason that training stops, as far as this rank knows it."""
    if math.isfinite(own) and not math.isfinite(mean):
        return PeerError(
            f"The loss of another rank is not finite at step {step}; the mean over ranks is {mean}."
        )
    path = next(filter(None, map(bad_input, batches)), None)
    if path is not None:
        return UserError(
            f"The loss is {own} at step {step}, because the batch's '{path}' has values that are not finite: look at "
            "the data."
        )
    hint = (
        ""
        if is_checked
        else " With --check-finite a run names the parameter that first has no finite gradient."
    )
    return UserError(
        f"The loss is {own} at step {step}: lower the learning rate, clip gradients (--clip), or look "
        f"for values in the data that the model cannot take.{hint}"
    )


def _checked_step(engine: Engine, batches: Sequence[Batch]) -> StepResult:
    """Run a step that ends before its update where the losses are finite and a gradient is not."""
    results = [
        engine.micro_step(batch, is_last=number == len(batches))
        for number, batch in enumerate(batches, 1)
    ]
    is_finite = all(math.isfinite(result.loss) for result in results)
    parameter = engine.first_bad_parameter()
    if engine.average(float(is_finite)) == 1 and parameter is not None:
        kind = UserError if engine.rank == 0 else PeerError
        raise kind(
            f"The loss is finite at step {engine.step_count + 1}, but gradients are not: the first of "
            f"{parameter.count} such parameters out of {parameter.of} is '{parameter.name}' of the unit "
            f"{parameter.unit}. Look for a division, a root or a logarithm of 0 there, or lower the learning rate."
        )
    return engine.update()
