"""Shampoo: algorithm 1 of Gupta et al. 2018 (arXiv 1802.09568), which has no defaults, with decoupled weight decay."""

from __future__ import annotations

from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.declaration import (
    Declaration,
    Numbers,
    OwnState,
    Shape,
    StatePart,
    StepScratch,
    WholeStep,
)
from zeroir.ir.optimizers.settings import NOT_NEGATIVE, Setting, weight_decay


def _sums(shape: Shape) -> tuple[StatePart, ...]:
    """Return the sums of products of the gradients of a matrix, of its rows and of its columns."""
    if len(shape) != 2:
        return ()
    rows, columns = shape
    return StatePart(name="rows", shape=(rows, rows)), StatePart(
        name="columns", shape=(columns, columns)
    )


def _scratch(shape: Shape) -> StepScratch:
    """Return scratch memory for new sums of rows and columns, their roots, one eigenvalue computation, and products."""
    rows, columns = shape
    long = max(shape)
    numel = 2 * (rows * rows + columns * columns) + 8 * long * long + 2 * rows * columns
    return StepScratch(own_bytes=DType.F32.itemsize_bytes * numel, product=(long, long, long))


def _flops(shape: Shape, _hyper: Numbers) -> int:
    """Return the FLOPs of the sums, the eigenvectors of each (9 n³), the roots, and two products."""
    rows, columns = shape
    return 4 * rows * columns * (rows + columns) + 11 * (rows**3 + columns**3)


SHAMPOO: Final = Declaration(
    title="Shampoo",
    definition="algorithm 1 of Gupta et al. 2018 ([arXiv 1802.09568](https://arxiv.org/abs/1802.09568)), with "
    "decoupled weight decay",
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
        scratch=_scratch,
        flops=_flops,
        own_state=OwnState(
            quantity="preconditioners",
            parts=_sums,
            is_sharded=True,
            numbers=2,
            description="*m*² + *n*² numbers of an *m* × *n* matrix",
        ),
        takes_matrices_alone=True,
    ),
    waits=lambda _: "the host waits for the eigenvalues of shampoo",
    most_numbers=6,  # other implementations also keep their roots, a moment and a diagonal accumulator
)
