"""The values that the engine reads from a program's buffers: named outputs, whose contents Z408 proves.

The engine does not search ops for the loss, the norm of the gradient, the decision to skip or the loss scale. The
header names the buffer of each, ``report squared_norm %norm``, and the verifier proves that the buffer has that value
when the engine reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from zeroir.ir.fields import NameKind, Refers


class Quantity(StrEnum):
    """A value that the engine reads, and when.

    After each micro-step section:

    * ``batch_loss``: the loss of each micro-batch that the section ran, f32[``Program.interleaved``], without weights.

    Before the update:

    * ``loss``: the sum of the losses of this rank's micro-batches in the step, each times its weight, f32[1].

    After the update:

    * ``summed_loss``: ``loss`` summed over all ranks, f32[1];
    * ``summed_weight``: the sum of the weights of the step's micro-batches on all ranks, f32[1], where the host gives
      the weights;
    * ``squared_norm``: the sum of the squares of the gradients that the decision read, f32[1];
    * ``skip``: 1 if the decision is to leave everything as it was, else 0, f32[1];
    * ``redo``: 1 if a speculative update was undone, else 0, f32[1].

    After an evaluation:

    * ``eval_loss``: the loss of this rank's batch, f32[1].

    Between steps, and a checkpoint keeps them:

    * ``step``: the number of updates that were not skipped, f32[1];
    * ``loss_scale``: the loss scale, and where it changes the steps since it grew and the hysteresis that is left,
      f32[3].
    """

    BATCH_LOSS = "batch_loss"
    LOSS = "loss"
    SUMMED_LOSS = "summed_loss"
    SUMMED_WEIGHT = "summed_weight"
    SQUARED_NORM = "squared_norm"
    SKIP = "skip"
    REDO = "redo"
    EVAL_LOSS = "eval_loss"
    STEP = "step"
    LOSS_SCALE = "loss_scale"


class Storing(StrEnum):
    """When the user's code stores a tensor: in each micro-step, or in each evaluation."""

    STEP = "step"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBinding:
    """The scalar buffer from which the engine reads a quantity."""

    syntax: ClassVar[str] = "{quantity} {buffer}"

    quantity: Quantity
    buffer: Annotated[str, Refers(NameKind.BUFFER, "{quantity} is reported from")]


def with_report(
    reports: tuple[ReportBinding, ...], quantity: Quantity, buffer: str
) -> tuple[ReportBinding, ...]:
    """Return the reports with the quantity in this buffer, replacing its earlier report if there is one."""
    own = ReportBinding(quantity=quantity, buffer=buffer)
    if any(report.quantity is quantity for report in reports):
        return tuple(own if report.quantity is quantity else report for report in reports)
    return (*reports, own)
