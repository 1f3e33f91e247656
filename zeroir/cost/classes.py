"""Classes of ranks that behave alike, so that only one rank of each is simulated.

Every rank runs the same ops on the same number of bytes. Ranks differ by their own speed, by the nodes of the ranks
that they communicate with, and by the classes of those. The classes are the coarsest partition in which all ranks of a
class have, along every axis, groups of equal rings and equal classes. Colour refinement finds it: a coarse partition is
split until nothing changes. By induction over the ops, all ranks of a class start and end each op at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.cost.collectives import Ring, ring_of
from zeroir.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that start and end each op at the same time, in ascending order.

    ``rings`` are the rings of their groups, by axis. ``peers`` are the classes in these groups, including their own, by
    axis and as ascending indices.
    """

    ranks: tuple[int, ...]
    is_straggler: bool
    rings: Mapping[str, Ring]
    peers: Mapping[str, tuple[int, ...]]


def rank_classes(mesh: Mesh, node_ranks: int, straggler: int | None = None) -> list[RankClass]:
    """Return the classes in the order of their first ranks; ``straggler`` is a rank that is slower than all others."""
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
    group_of_rank = [0] * world_size
    for number, group in enumerate(groups):
        for rank in group:
            group_of_rank[rank] = number
    return group_of_rank


def _numbered(keys: list[tuple[object, ...]]) -> list[int]:
    """Return equal keys as equal numbers, in the order in which they first appear."""
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
