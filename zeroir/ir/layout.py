"""The places of parameters in a flat: first-use order, 64-element slots, zeros up to a multiple of world size × 256.

Offsets do not depend on the world size, so re-lowering for another one moves no parameter; only the padding at the end
changes. The 256 keeps every rank's slice on a 16-byte boundary and on a multiple of 8 elements, which makes the fused
optimizers' results bitwise independent of the sharding. Where the optimizer's states have 8 bits, parameters start at
multiples of 256, so that a block of elements with one scale belongs to one parameter and to one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroir.ir.program import PARAMETER_ALIGNMENT_NUMEL, SHARD_ALIGNMENT_NUMEL, Flat, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter to be laid out: its fully-qualified name, its shape, and its other names if it is tied."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


def layout(
    parameters: Sequence[Parameter],
    world_size: int,
    *,
    alignment_numel: int = PARAMETER_ALIGNMENT_NUMEL,
) -> tuple[tuple[Slot, ...], int]:
    """Place parameters in the order given; return their slots and the padded number of elements of the flat.

    Each starts at a multiple of ``alignment_numel``, itself a multiple of 64.

    Raises:
        ValueError: if the world size is below 1.
    """
    slots: list[Slot] = []
    stop = 0
    for parameter in parameters:
        slot = Slot(
            name=parameter.name,
            offset=round_up(stop, alignment_numel),
            shape=parameter.shape,
            aliases=parameter.aliases,
        )
        stop = slot.offset + slot.numel
        slots.append(slot)
    return tuple(slots), padded_numel(stop, world_size)


def padded_numel(used_numel: int, world_size: int) -> int:
    """Return the smallest positive multiple of ``world_size`` × 256 that has room for ``used_numel`` elements.

    Raises:
        ValueError: if the world size is below 1.
    """
    if world_size < 1:
        raise ValueError(f"a world size of {world_size} has no ranks")
    return max(
        round_up(used_numel, world_size * SHARD_ALIGNMENT_NUMEL), world_size * SHARD_ALIGNMENT_NUMEL
    )


def used_numel(flat: Flat) -> int:
    """Return one past the last element of a flat that belongs to a parameter."""
    return max((slot.offset + slot.numel for slot in flat.slots), default=0)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
