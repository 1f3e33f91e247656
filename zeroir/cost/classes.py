"""Which ranks behave alike, so that one of them stands for all.

Every rank carries out the same ops on as many bytes. Ranks differ by their own speed, by where the ranks stand that
they communicate with, and by how these behave in turn. The classes are the coarsest partition in which ranks of a class
have, along every axis, groups of equal rings and equal classes; it is found by refining the plainest one until nothing
changes (colour refinement). By induction over the ops, all ranks of a class do everything at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.cost.collectives import Ring, ring_of
from zeroir.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that do everything at the same time, in ascending order.

    ``rings`` are those of their groups by axis, and ``peers`` the classes in these groups, by axis and including their
    own, as ascending indices.
    """

    ranks: tuple[int, ...]
    is_straggler: bool
    rings: Mapping[str, Ring]
    peers: Mapping[str, tuple[int, ...]]


def rank_classes(mesh: Mesh, node_ranks: int, straggler: int | None = None) -> list[RankClass]:
    """The classes in the order of their first ranks; ``straggler`` is a rank that is slower than all others."""
    groups = {axis.name: mesh.groups(axis.name) for axis in mesh.axes}
    rings = {
        name: [ring_of(group, node_ranks) for group in of_axis] for name, of_axis in groups.items()
    }
    group_of = {name: _group_of(of_axis, mesh.world_size) for name, of_axis in groups.items()}
    colours = _numbered(
        [
            (rank == straggler, *(rings[name][group_of[name][rank]] for name in groups))
            for rank in range(mesh.world_size)
        ]
    )
    while True:
        palettes = {
            name: [frozenset(colours[rank] for rank in group) for group in of_axis]
            for name, of_axis in groups.items()
        }
        finer = _numbered(
            [
                (colour, *(palettes[name][group_of[name][rank]] for name in groups))
                for rank, colour in enumerate(colours)
            ]
        )
        if len(set(finer)) == len(set(colours)):
            break
        colours = finer
    members: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        members.setdefault(colour, []).append(rank)
    return [
        RankClass(
            ranks=tuple(ranks),
            is_straggler=ranks[0] == straggler,
            rings={name: rings[name][group_of[name][ranks[0]]] for name in groups},
            peers={
                name: tuple(sorted(palettes[name][group_of[name][ranks[0]]])) for name in groups
            },
        )
        for ranks in members.values()
    ]


def _group_of(groups: tuple[tuple[int, ...], ...], world_size: int) -> list[int]:
    found = [0] * world_size
    for number, group in enumerate(groups):
        for rank in group:
            found[rank] = number
    return found


def _numbered(keys: list[tuple[object, ...]]) -> list[int]:
    """Equal keys as equal numbers, in the order in which they first appear."""
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
