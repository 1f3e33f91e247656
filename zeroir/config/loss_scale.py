"""The loss scale of FP16."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zeroir.config.table import Option, OptionObject
from zeroir.ir.limits import LARGEST_SCALAR, MOST_COUNT

_GROUP = "Loss scale (fp16)"


class LossScale(OptionObject):
    """The factor of the loss in FP16: ``fixed``, or dynamic.

    A dynamic scale begins with ``initial``, grows by ``factor`` after ``window`` steps without overflow, and shrinks by
    it after ``hysteresis`` overflows, but not below ``minimum``. With ``consecutive_hysteresis`` only consecutive
    overflows count. A step that overflows is skipped.
    """

    fixed: Annotated[
        float | None,
        Field(gt=0, le=LARGEST_SCALAR),
        Option(
            name="loss_scale",
            group=_GROUP,
            help="Loss scale that never changes (fp16). An overflow still skips the step. [default: dynamic]",
        ),
    ] = None
    initial: Annotated[
        float,
        Field(gt=0, le=LARGEST_SCALAR),
        Option(name="initial_loss_scale", group=_GROUP, help="First loss scale (fp16)."),
    ] = 2.0**16
    window: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(
            name="loss_scale_window",
            group=_GROUP,
            help="Steps without overflow after which the loss scale grows (fp16).",
        ),
    ] = 1000
    factor: Annotated[
        float,
        Field(gt=1, le=LARGEST_SCALAR),
        Option(
            name="loss_scale_factor",
            group=_GROUP,
            help="Factor by which the loss scale grows and shrinks (fp16).",
        ),
    ] = 2.0
    hysteresis: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(
            name="loss_scale_hysteresis",
            group=_GROUP,
            help="Overflows before the loss scale shrinks (fp16).",
        ),
    ] = 2
    consecutive_hysteresis: Annotated[
        bool,
        Option(
            name="loss_scale_consecutive_hysteresis",
            group=_GROUP,
            help="Count only consecutive overflows for the hysteresis, instead of all since the loss scale grew last "
            "(fp16).",
        ),
    ] = False
    minimum: Annotated[
        float,
        Field(gt=0, le=LARGEST_SCALAR),
        Option(name="minimum_loss_scale", group=_GROUP, help="Smallest loss scale (fp16)."),
    ] = 1.0
