"""Shampoo: algorithm 1 of Gupta et al. 2018 (arXiv 1802.09568), which has no defaults, with decoupled weight decay."""

from __future__ import annotations

from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.declaration import Declaration, OwnState, Shape, StatePart, WholeStep
from zeroir.ir.optimizers.settings import NOT_NEGATIVE, Setting, weight_decay


def _sums(shape: Shape) -> tuple[StatePart, ...]:
    """The sums of products of the gradients of a matrix, of its rows and of its columns."""
    if len(shape) != 2:
        return ()
    rows, columns = shape
    return StatePart(name="rows", shape=(rows, rows)), StatePart(
        name="columns", shape=(columns, columns)
    )


SHAMPOO: Final = Declaration(
    title="Shampoo",
    settings=(
        Setting(
            name="eps",
            default=1e-4,
            effect="number added to eigenvalues",
            limits=NOT_NEGATIVE,
        ),
        weight_decay(0.0),
    ),
    whole=WholeStep(
        direction_dtype=DType.F32,
        own_state=OwnState(quantity="preconditioners", parts=_sums, is_sharded=True, numbers=2),
        takes_matrices_alone=True,
    ),
    most_numbers=6,  # elsewhere also their roots, a moment and a diagonal accumulator
)
