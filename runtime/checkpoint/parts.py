"""The elements of flats that each rank saves: one rank saves each element of each quantity.

Where several ranks hold the same elements, each saves an equal part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroir.checkpoint.manifest import MASTER as TRAINED
from zeroir.ir.analysis.held_elements import held_by_all, held_elements, is_within, save_order
from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import EMA, MASTER, PARAM, PASSING, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import round_up, used_numel
from zeroir.ir.own_coordinates import OWN_COORDINATES, own_numel
from zeroir.ir.program import PARAMETER_ALIGNMENT_NUMEL, Flat, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """Elements ``[start, stop)`` of a quantity of a flat, which a rank holds from element ``offset`` of a buffer on."""

    flat: str
    quantity: str
    dtype: DType
    start: int
    stop: int
    buffer: str
    offset: int

    @property
    def tensor(self) -> str:
        """The name of their tensor in the rank's file."""
        return f"{self.flat}.{self.quantity}[{self.start}:{self.stop}]"


SavedQuantity = tuple[Flat, str, list[tuple[Buffer, FlatContent]]]
"""A quantity of a flat, and the buffers that together hold each of its elements once."""


def saved_parts(
    program: Program, rank: int, quantities: Sequence[SavedQuantity]
) -> Iterator[SavedPart]:
    """Yield what a rank saves of these quantities, in their order, without padding after the last parameter."""
    for flat, quantity, buffers in quantities:
        stop = quantity_numel(flat, quantity)
        for buffer, content in buffers:
            own = _own_elements(program, buffer, content, rank)
            first, last = own.start, min(own.stop, stop)
            if first >= last:
                continue
            yield SavedPart(
                flat=flat.name,
                quantity=quantity,
                dtype=buffer.dtype,
                start=first,
                stop=last,
                buffer=buffer.name,
                offset=first - elements_on(program, buffer, content, rank).start,
            )


def saved_quantities(program: Program) -> list[SavedQuantity]:
    """Return every quantity of every flat that a checkpoint has, in the order of the program.

    Parameters are saved as they are trained: as master weights where there are any.
    """
    saved: list[SavedQuantity] = []
    by_flat: dict[str, dict[str, list[tuple[Buffer, FlatContent]]]] = {}
    for buffer in program.buffers:
        content = buffer.holds
        if isinstance(content, FlatContent) and content.quantity not in PASSING:
            quantities = by_flat.setdefault(content.flat, {})
            quantities.setdefault(content.quantity, []).append((buffer, content))
    for flat in program.flats:
        quantities = by_flat.get(flat.name, {})
        trained = quantities.pop(MASTER, None) or quantities.pop(PARAM, None)
        quantities.pop(PARAM, None)
        if trained is not None:
            saved.append((flat, TRAINED, _covering(program, trained)))
        for quantity, buffers in quantities.items():
            saved.append((flat, quantity, _covering(program, buffers)))
    return saved


def state_quantities(program: Program) -> dict[str, frozenset[str]]:
    """Return the names of each flat's optimizer states, by the flat's name."""
    states: dict[str, set[str]] = {flat.name: set() for flat in program.flats}
    for flat, quantity, _ in saved_quantities(program):
        if quantity not in (TRAINED, EMA):
            states[flat.name].add(quantity)
    return {name: frozenset(quantities) for name, quantities in states.items()}


def quantity_numel(flat: Flat, quantity: str) -> int:
    """Return the number of elements of a quantity of a flat, up to the last one that belongs to a parameter."""
    return own_numel(quantity, flat) if quantity in OWN_COORDINATES else used_numel(flat)


def elements_on(program: Program, buffer: Buffer, content: FlatContent, rank: int) -> range:
    """Return the elements of its flat that a buffer holds on a rank."""
    return held_elements(content, buffer.numel, program.mesh.coordinate(rank))


def _own_elements(program: Program, buffer: Buffer, content: FlatContent, rank: int) -> range:
    """Return the part that a rank saves of the elements in its buffer, which other ranks may hold as well."""
    part = elements_on(program, buffer, content, rank)
    # Axis by axis, in the same way as section ``save`` divides its copies along the first axis.
    for axis in program.mesh.axes:
        if axis.name != content.shard:
            numel = round_up(-(-len(part) // axis.size), PARAMETER_ALIGNMENT_NUMEL)
            part = part[program.mesh.coordinate(rank)[axis.name] * numel :][:numel]
    return part


def _covering(
    program: Program, buffers: list[tuple[Buffer, FlatContent]]
) -> list[tuple[Buffer, FlatContent]]:
    """Return buffers that hold each element of a quantity once; the other buffers only have copies of these elements.

    Of buffers with the same elements it prefers the one that section ``save`` copies: a slice to a copy, and host
    memory to other spaces.
    """
    covering: list[tuple[Buffer, FlatContent]] = []
    covered: list[tuple[range, ...]] = []
    for buffer, content in sorted(buffers, key=save_order):
        elements = held_by_all(content, buffer.numel, program.mesh)
        if not any(is_within(elements, others) for others in covered):
            covered.append(elements)
            covering.append((buffer, content))
    return covering
