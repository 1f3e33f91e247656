"""The kinds of units of a model. A search only chooses how many units of each kind to use, since they are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program

_ROOT: Final = "root"
_MOST_KINDS: Final = 4
"""With more kinds, the most similar ones are merged, since every kind adds an axis to the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Equal units, in the order of their first use.

    ``parameters_numel`` is the size of each, ``saved_bytes`` what each forward keeps for its backward alone, and
    ``flops`` what that forward computes.
    """

    units: tuple[str, ...]
    parameters_numel: int
    saved_bytes: int
    flops: int


def repeated_units(program: Program) -> tuple[str, ...]:
    """Return the units that a model repeats, such as its blocks, in the order of their first use."""
    units = dict.fromkeys(op.unit for op in program.step_ops() if isinstance(op, ops.Compute))
    return tuple(unit for unit in units if unit.partition(".")[0] != _ROOT)


def unit_classes(program: Program) -> tuple[UnitClass, ...]:
    """Return the repeated units by kind: those with equal forward segments and equal layouts of parameters."""
    view = SectionView(program, program.sections[0].body)
    forwards = {index: op for index, op in view.computes.items() if index not in view.backward}
    flats: dict[str, list[tuple[int, str, bool]]] = {}
    for flat in program.flats:
        shape = (flat.padded_numel, flat.dtype.value, flat.is_trainable)
        flats.setdefault(flat.unit, []).append(shape)
    alike: dict[object, list[str]] = {}
    for unit in repeated_units(program):
        calls = tuple(op.segment for op in forwards.values() if op.unit == unit)
        alike.setdefault((calls, tuple(flats.get(unit, ()))), []).append(unit)
    read_by = {
        name: {view.computes[index].unit for index in readers if index in forwards}
        for name, readers in view.readers.items()
    }
    classes: list[UnitClass] = []
    for units in alike.values():
        own = [op for op in forwards.values() if op.unit == units[0]]
        written = {d.view.region.buffer for op in own for d in op.destinations if d is not None}
        buffers = [program.buffer_by_name[name] for name in written]
        classes.append(
            UnitClass(
                units=tuple(units),
                parameters_numel=sum(numel for numel, _, _ in flats.get(units[0], ())),
                saved_bytes=sum(
                    buffer.size_bytes
                    for buffer in buffers
                    if buffer.role is Role.SAVED and read_by.get(buffer.name, set()) <= {units[0]}
                ),
                flops=sum(program.segment_by_name[op.segment].flops for op in own),
            )
        )
    return tuple(classes)


def to_recompute(kinds: Sequence[UnitClass]) -> tuple[tuple[str, ...], ...]:
    """Return the units by kind in the best order of recomputation: most saved bytes for their arithmetic first."""
    return _merged(kinds, lambda kind: kind.saved_bytes / (kind.flops + 1))


def to_unshard(kinds: Sequence[UnitClass]) -> tuple[tuple[str, ...], ...]:
    """Return the units by kind, sorted by size, the last unit of each first: it is used again soonest."""
    axes = _merged(kinds, lambda kind: kind.parameters_numel)
    return tuple(units[::-1] for units in axes)


def _merged(
    kinds: Sequence[UnitClass], weight_of: Callable[[UnitClass], float]
) -> tuple[tuple[str, ...], ...]:
    """Return the units by kind, heaviest first; if there are too many kinds, those of similar weight are merged."""
    ranked = sorted(kinds, key=weight_of, reverse=True)
    groups = [[kind] for kind in ranked]
    while len(groups) > _MOST_KINDS:
        gaps = [
            (weight_of(high[-1]) + 1e-30) / (weight_of(low[0]) + 1e-30)
            for high, low in pairwise(groups)
        ]
        at = gaps.index(min(gaps))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return tuple(tuple(unit for kind in group for unit in kind.units) for group in groups)
