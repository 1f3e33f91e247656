"""Evaluations between the steps of ``zeroir run``: the weighted mean loss over all batches of all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from zeroir.errors import BatchError, UserError
from zeroir.runtime.comm.job import PeerError
from zeroir.runtime.training.users_code import in_users_code
from zeroir.torch_ops.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluations after every ``every``-th step and after the last, each on the batches of a new iterator."""

    every: int
    batches: Callable[[], Iterable[Batch]]

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether an evaluation follows this step, counted from 1, of ``steps``."""
        return step % self.every == 0 or step == steps


class HasLoss(Protocol):
    """The result of an evaluation on one rank."""

    @property
    def loss(self) -> float:
        """The loss of the rank's batch."""
        ...

    @property
    def weight(self) -> float:
        """The weight of the rank's batch."""
        ...


class Evaluator(Protocol):
    """The part of an engine that evaluations use."""

    def evaluate(self, batch: Batch, /) -> HasLoss:
        """Evaluate one batch of this rank."""
        ...

    def average(self, value: float, /) -> float:
        """Return the mean of every rank's value."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One evaluation, after ``step`` steps.

    ``loss`` is the weighted mean over all ranks and batches, NaN where all weights are 0; ``batches`` is the number of
    batches per rank, ``seconds`` the total time.
    """

    step: int
    loss: float
    batches: int
    seconds: float


def evaluate(engine: Evaluator, evaluations: Evaluations, step: int) -> EvaluationReport:
    """Evaluate once on all ranks together. The report is the same on every rank, except for times.

    Raises:
        UserError: on every rank, where the batches fail, do not fit, or differ in number between ranks.
    """
    start = time.perf_counter()
    batches, total_loss, total_weight = 0, 0.0, 0.0
    with in_users_code("eval_batches()", f" after step {step}"):
        iterator = iter(evaluations.batches())
    while True:
        batch, is_there = _next(iterator, step)
        share = engine.average(float(is_there))
        if share not in (0.0, 1.0):
            raise _unequal(batches, is_there=is_there)
        if not is_there:
            break
        try:
            evaluation = engine.evaluate(batch)
        except BatchError as error:
            raise UserError(f"eval_batches() gave a wrong batch {batches + 1}: {error}") from error
        batches += 1
        # The loss of a batch without data may be NaN.
        if weight := evaluation.weight:
            total_loss += weight * evaluation.loss
            total_weight += weight
    if not batches:
        raise UserError("eval_batches() yields no batch: yield at least one on every rank.")
    loss, weight = engine.average(total_loss), engine.average(total_weight)
    return EvaluationReport(
        step=step,
        loss=loss / weight if weight else math.nan,
        batches=batches,
        seconds=time.perf_counter() - start,
    )


def _next(iterator: Iterator[Batch], step: int) -> tuple[Batch, bool]:
    """Return the next batch, and whether there is one."""
    try:
        with in_users_code("eval_batches()", f" after step {step}"):
            return next(iterator), True
    except StopIteration:
        return None, False


def _unequal(count: int, *, is_there: bool) -> UserError:
    """Return the error for different numbers of batches; the ranks whose batches have ended report it."""
    if is_there:
        return PeerError(
            f"eval_batches() yields more than {count} batches here than on another rank."
        )
    return UserError(
        f"eval_batches() yields {count} batches on this rank and more on another: yield equally many on every rank."
    )
