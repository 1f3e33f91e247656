"""Ranks of a class have equal rings and, along every axis, peers of the same classes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.cost.classes import rank_classes
from zeroir.cost.collectives import ring_of
from zeroir.ir.mesh import Axis, Mesh

MESHES = st.builds(
    lambda sizes: Mesh(axes=tuple(Axis(name=f"a{n}", size=s) for n, s in enumerate(sizes))),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)


def _mesh(**sizes: int) -> Mesh:
    return Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))


def _sizes(mesh: Mesh, node_ranks: int, straggler: int | None = None) -> list[int]:
    return [len(rank_class.ranks) for rank_class in rank_classes(mesh, node_ranks, straggler)]


def test_equally_placed_ranks_are_one_class() -> None:
    assert _sizes(_mesh(dp=1024), 8) == [1024]
    assert _sizes(_mesh(replicate=128, shard=8), 8) == [1024]
    assert _sizes(_mesh(dp=12), 8) == [12]  # rank_class group: it is the same ring for all


def test_groups_over_different_nodes_are_classes_of_their_own() -> None:
    """Ranks 0 to 5 share a node of 8, and 6 to 11 stand on two."""
    for rank_class in rank_classes(_mesh(replicate=2, shard=6), 8):
        assert {rank < 6 for rank in rank_class.ranks} == {rank_class.rings["shard"].nodes == 1}
        # Ranks 0 and 6 share a node, and so do 1 and 7; 2 and 8 do not.
        assert {rank % 6 < 2 for rank in rank_class.ranks} == {
            rank_class.rings["replicate"].nodes == 1
        }


def test_a_straggler_its_peers_and_the_rest_are_classes() -> None:
    assert _sizes(_mesh(dp=8), 8, 0) == [1, 7]
    classes = rank_classes(_mesh(replicate=4, shard=8), 8, 0)
    assert [len(rank_class.ranks) for rank_class in classes] == [1, 7, 3, 21]
    assert [rank_class.is_straggler for rank_class in classes] == [True, False, False, False]
    assert classes[0].peers == {"replicate": (0, 2), "shard": (0, 1)}


@examples(40)
@given(mesh=MESHES, node_ranks=st.integers(1, 8), data=st.data())
def test_one_rank_stands_for_its_class(mesh: Mesh, node_ranks: int, data: st.DataObject) -> None:
    straggler = data.draw(st.none() | st.integers(0, mesh.world_size - 1))
    classes = rank_classes(mesh, node_ranks, straggler)
    of_rank = {
        rank: number for number, rank_class in enumerate(classes) for rank in rank_class.ranks
    }
    assert sorted(of_rank) == list(range(mesh.world_size))
    assert [rank_class.ranks[0] for rank_class in classes] == sorted(
        rank_class.ranks[0] for rank_class in classes
    )
    for axis in mesh.axes:
        for group in mesh.groups(axis.name):
            peers = tuple(sorted({of_rank[rank] for rank in group}))
            for rank in group:
                rank_class = classes[of_rank[rank]]
                assert rank_class.peers[axis.name] == peers
                assert rank_class.rings[axis.name] == ring_of(group, node_ranks)
                assert rank_class.is_straggler == (rank == straggler)
