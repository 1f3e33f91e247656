"""Adafactor, as in ``torch.optim``: factored second moments instead of one for each element."""

from __future__ import annotations

from math import prod
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.declaration import (
    Declaration,
    OwnState,
    Shape,
    StatePart,
    StepScratch,
    WholeStep,
)
from zeroir.ir.optimizers.elsewhere import InDeepSpeed, InTorch
from zeroir.ir.optimizers.settings import NOT_NEGATIVE, Limits, Setting, weight_decay


def _moments(shape: Shape) -> tuple[StatePart, ...]:
    """Return moments of rows and columns for matrices of the last two dimensions, or else those of the elements."""
    if len(shape) < 2:
        return (StatePart(name="variance", shape=shape),)
    return (
        StatePart(name="row_var", shape=(*shape[:-1], 1)),
        StatePart(name="col_var", shape=(*shape[:-2], 1, shape[-1])),
    )


def _scratch(shape: Shape) -> StepScratch:
    """Return the scratch memory: the elements' second moments, a product, and new moments of rows and of columns."""
    numel = prod(shape)
    rows = numel // max(shape[-1], 1) if shape else 1
    columns = numel // max(shape[-2], 1) if len(shape) > 1 else numel
    return StepScratch(own_bytes=DType.F32.itemsize_bytes * (numel + 2 * rows + 2 * columns))


ADAFACTOR: Final = Declaration(
    title="Adafactor",
    settings=(
        Setting(
            name="beta2_decay",
            default=-0.8,
            effect="exponent of the decay of the second moment",
            limits=Limits(at_most=0),
        ),
        Setting(
            name="eps",
            default=2.0**-23,
            effect="least denominator",
            limits=NOT_NEGATIVE,
            torch_pair=("eps", 0),
        ),
        Setting(
            name="eps2",
            default=1e-3,
            effect="least root mean square of a parameter by which its steps are scaled",
            limits=NOT_NEGATIVE,
            torch_pair=("eps", 1),
        ),
        Setting(
            name="d",
            default=1.0,
            effect="largest root mean square of an unscaled step",
            limits=Limits(at_least=1),
        ),
        weight_decay(0.0),
    ),
    whole=WholeStep(
        direction_dtype=DType.F32,
        scratch=_scratch,
        # They are so few that every rank keeps all of them.
        own_state=OwnState(
            quantity="factors",
            parts=_moments,
            is_sharded=False,
            numbers=0,
            description="one number for each row and column",
        ),
        reads_parameters=True,
    ),
    torch=InTorch(class_name="Adafactor", counts_steps=True),
    deepspeed=InDeepSpeed(
        types=("Adafactor",),
        is_from_torch=True,
        defaults={"lr": 1e-2, "eps": (None, 1e-3)},
    ),
    most_numbers=1,  # other implementations also keep a first moment
)
