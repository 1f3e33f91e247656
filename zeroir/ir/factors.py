"""The layouts of states of whole parameters, whose elements are not those of the parameters.

Adafactor keeps factored second moments instead of one for each element.

For each parameter of a flat, in the order of its slots, stand the moments of its rows and then of its columns (of each
matrix of its last two dimensions, as torch.optim.Adafactor has them); for a parameter of fewer than two dimensions the
moments of its elements. They are so few that every rank keeps all of them. Shampoo's sums are many, and sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zeroir.ir.contents import FACTORS, PRECONDITIONERS
from zeroir.ir.eight_bit_states import blocks_numel
from zeroir.ir.layout import used_numel
from zeroir.ir.program import Flat, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The moments of one parameter: their first element, and the shapes of those of rows and of columns.

    Of a parameter of fewer than two dimensions ``row_shape`` is the shape itself, and ``column_shape`` None.
    """

    slot: Slot
    offset: int
    row_shape: tuple[int, ...]
    column_shape: tuple[int, ...] | None

    @property
    def rows_numel(self) -> int:
        """The number of elements of ``row_shape``."""
        return math.prod(self.row_shape)

    @property
    def numel(self) -> int:
        """The number of all moments."""
        columns = 0 if self.column_shape is None else math.prod(self.column_shape)
        return self.rows_numel + columns


def factors(flat: Flat) -> Iterator[Factor]:
    """The moments of each parameter of a flat, one after the other."""
    offset = 0
    for slot in flat.slots:
        shape = slot.shape
        is_factored = len(shape) > 1
        factor = Factor(
            slot=slot,
            offset=offset,
            row_shape=(*shape[:-1], 1) if is_factored else shape,
            column_shape=(*shape[:-2], 1, shape[-1]) if is_factored else None,
        )
        offset += factor.numel
        yield factor


def factors_numel(flat: Flat) -> int:
    """The number of all moments of a flat, at least 1."""
    return max(sum(factor.numel for factor in factors(flat)), 1)


def preconditioners_numel(flat: Flat) -> int:
    """The elements of Shampoo's sums: of each m × n parameter in turn an m × m and an n × n matrix, row by row."""
    return sum(rows * rows + columns * columns for rows, columns in _sides(flat))


def preconditioners(flat: Flat) -> Iterator[tuple[Slot, int]]:
    """The parameters, and the first element of the sums of each."""
    offset = 0
    for slot, (rows, columns) in zip(flat.slots, _sides(flat), strict=True):
        yield slot, offset
        offset += rows * rows + columns * columns


def _sides(flat: Flat) -> Iterator[tuple[int, int]]:
    """The rows and columns of each parameter; of one that is no matrix nothing is kept."""
    for slot in flat.slots:
        yield (slot.shape[0], slot.shape[1]) if len(slot.shape) == 2 else (0, 0)


def own_numel(quantity: str, flat: Flat) -> int:
    """The number of elements of a quantity with coordinates of its own, without padding."""
    if quantity == FACTORS:
        return factors_numel(flat)
    if quantity == PRECONDITIONERS:
        return preconditioners_numel(flat)
    return blocks_numel(used_numel(flat))
