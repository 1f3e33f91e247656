"""The forms of a state of elements: FP32, or 8 bits as codes and scales of blocks.

Each form is one or two quantities of a flat. 8-bit states also differ in their arithmetic, which is defined in
``zeroir/ir/eight_bit_states.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.optimizers.catalogue import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNumbers:
    """A quantity with one number for each block of ``block_numel`` consecutive elements.

    The last block may be short.
    """

    quantity: str
    dtype: DType
    block_numel: int = 1

    def numel(self, elements_numel: int) -> int:
        """Return the number of stored numbers for so many elements."""
        return -(-elements_numel // self.block_numel)


class StateForm(IntEnum):
    """How a state of elements is stored."""

    FP32 = 0
    EIGHT_BITS = 1

    def numbers(self, state: str) -> tuple[StoredNumbers, ...]:
        """Return the quantities of a state: the numbers of elements, and those of blocks."""
        match self:
            case StateForm.FP32:
                return (StoredNumbers(quantity=state, dtype=DType.F32),)
            case StateForm.EIGHT_BITS:
                codes = StoredNumbers(quantity=f"{state}_codes", dtype=DType.U8)
                scales = StoredNumbers(
                    quantity=f"{state}_absmax", dtype=DType.F32, block_numel=BLOCK_NUMEL
                )
                return codes, scales

    @property
    def bits(self) -> int:
        """The bits of an element, without its part of the block's number."""
        return 8 * self.numbers("any")[0].dtype.itemsize_bytes

    @property
    def bytes_per_element(self) -> float:
        """The bytes of an element with its part of a block's number."""
        return sum(n.dtype.itemsize_bytes / n.block_numel for n in self.numbers("any"))

    @property
    def block_numel(self) -> int:
        """The most elements of a block; parameters start with a block, and no shard splits one."""
        return max(numbers.block_numel for numbers in self.numbers("any"))


def form_of_bits(bits: int) -> StateForm:
    """Return the form with so many bits."""
    return next(form for form in StateForm if form.bits == bits)


_STATES: Final = {
    state.name: state
    for algorithm in Algorithm
    if algorithm.has_states_of_elements
    for state in algorithm.declaration.states
}
"""The states that can have any form."""


def is_signed(state: str) -> bool:
    """Return whether elements of a state can be negative."""
    return _STATES[state].is_signed


CODES: Final[Mapping[str, str]] = {
    state: StateForm.EIGHT_BITS.numbers(state)[0].quantity for state in _STATES
}
"""The quantity of the codes of each state in 8 bits."""

ABSMAX: Final[Mapping[str, str]] = {
    state: StateForm.EIGHT_BITS.numbers(state)[1].quantity for state in _STATES
}
"""The quantity of its scales: the largest absolute value of each block, in coordinates of their own."""

_FORMS: Final[Mapping[str, tuple[str, StateForm, StoredNumbers]]] = {
    numbers.quantity: (state, form, numbers)
    for state in _STATES
    for form in StateForm
    for numbers in form.numbers(state)
}

QUANTITIES_OF_BLOCKS: Final = tuple(
    quantity for quantity, (_, _, numbers) in _FORMS.items() if numbers.block_numel > 1
)
"""The quantities with fewer numbers than elements."""


def numbers_of(quantity: str) -> StoredNumbers:
    """Return how a quantity is stored; one that is not part of a state of elements has FP32 numbers."""
    numbers = StoredNumbers(quantity=quantity, dtype=DType.F32)
    return _FORMS[quantity][2] if quantity in _FORMS else numbers


def block_numel(quantity: str) -> int:
    """Return the number of elements per number of a quantity."""
    return numbers_of(quantity).block_numel


def state_of(quantity: str) -> str:
    """Return the state to which a quantity belongs, or which it is."""
    return _FORMS[quantity][0] if quantity in _FORMS else quantity


def form_of(quantity: str) -> StateForm:
    """Return the form of a state with such a quantity."""
    return _FORMS[quantity][1] if quantity in _FORMS else StateForm.FP32


def in_another_form(quantity: str) -> tuple[str, ...]:
    """Return the quantities of the other form of a state, which can be converted to this one.

    None for other quantities.
    """
    if quantity not in _FORMS:
        return ()
    state, form, _ = _FORMS[quantity]
    return tuple(
        n.quantity for other in StateForm if other is not form for n in other.numbers(state)
    )
