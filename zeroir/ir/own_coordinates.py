"""Quantities of a flat whose elements are not those of its parameters.

They are the optimizers' states of whole parameters (``OwnState``), and the scales of states of 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.ir.layout import used_numel
from zeroir.ir.optimizers.catalogue import OWN_STATES
from zeroir.ir.optimizers.declaration import Shape
from zeroir.ir.optimizers.forms import QUANTITIES_OF_BLOCKS, block_numel
from zeroir.ir.program import Flat, Slot

OWN_COORDINATES: Final = (*OWN_STATES, *QUANTITIES_OF_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotElements:
    """The elements of a quantity that belong to a parameter of a flat."""

    slot: Slot
    offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """A tensor that an optimizer keeps for a whole parameter, and its first element in the quantity of the flat."""

    name: str
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The index after its last element."""
        return self.offset + self.numel


def placed_parts(quantity: str, shapes: Iterable[Shape]) -> Iterator[tuple[PlacedPart, ...]]:
    """Yield the tensors that an optimizer keeps for each parameter of a flat; ``shapes`` are the parameters' shapes."""
    own_state = OWN_STATES[quantity]
    offset = 0
    for shape in shapes:
        placed: list[PlacedPart] = []
        for part in own_state.parts(shape):
            placed.append(PlacedPart(name=part.name, shape=part.shape, offset=offset))
            offset = placed[-1].stop
        yield tuple(placed)


def extents(quantity: str, flat: Flat) -> Iterator[SlotElements]:
    """Yield the elements of each parameter of a flat, in the coordinates of the quantity."""
    if quantity in OWN_STATES:
        stop = 0
        shapes = (slot.shape for slot in flat.slots)
        for slot, parts in zip(flat.slots, placed_parts(quantity, shapes), strict=True):
            start, stop = stop, parts[-1].stop if parts else stop
            yield SlotElements(slot=slot, offset=start, numel=stop - start)
        return
    block = block_numel(quantity)
    for slot in flat.slots:
        yield SlotElements(slot=slot, offset=slot.offset // block, numel=-(-slot.numel // block))


def own_numel(quantity: str, flat: Flat) -> int:
    """Return the number of elements of a quantity with its own coordinates, without padding; at least 1."""
    if quantity in OWN_STATES:
        return max(sum(extent.numel for extent in extents(quantity, flat)), 1)
    return -(-used_numel(flat) // block_numel(quantity))
