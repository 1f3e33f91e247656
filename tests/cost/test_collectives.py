"""The costs of collectives, compared with figures computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import machine
from tests.support.examples import examples
from zeroir.cost.collectives import Ring, ring_of, transfer
from zeroir.cost.machine import CollectiveKind
from zeroir.cost.wires import Wire
from zeroir.errors import UserError

KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def test_the_ring_of_a_group_counts_ranks_and_nodes() -> None:
    assert ring_of(range(8), 8) == Ring(ranks=8, nodes=1, fewest=8, most=8)
    assert ring_of(range(0, 64, 8), 8) == Ring(ranks=8, nodes=8, fewest=1, most=1)
    assert ring_of(range(12), 8) == Ring(ranks=12, nodes=2, fewest=4, most=8)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    # 8 GB at 100 GB/s: 80 ms, times 7/8, 7/8, 14/8 and 1.
    [("all_gather", 0.07), ("reduce_scatter", 0.07), ("all_reduce", 0.14), ("broadcast", 0.08)],
)
def test_within_a_node_the_bus_factors_hold(kind: CollectiveKind, seconds: float) -> None:
    of = machine(node_bytes_per_s=100e9)
    cost = transfer(of, kind, ring_of(range(8), 8), 8_000_000_000)
    assert cost.seconds == pytest.approx(seconds)
    assert cost.bytes_by_wire == {Wire.NODE_LINK: pytest.approx(seconds * 100e9)}
    assert cost.demand_by_wire == {Wire.NODE_LINK: 1.0}


def test_over_nodes_every_adapter_of_the_node_takes_part() -> None:
    """16 ranks on 2 nodes: each sends 15/16 of 16 GB, seven eighths of it inside; 8 adapters share the rest."""
    of = machine(node_bytes_per_s=100e9, network_bytes_per_s=10e9)
    cost = transfer(of, "all_gather", ring_of(range(16), 8), 16_000_000_000)
    assert cost.bytes_by_wire[Wire.NETWORK] == pytest.approx(15e9 / 8)
    assert cost.bytes_by_wire[Wire.NODE_LINK] == pytest.approx(15e9 * 7 / 8)
    assert cost.seconds == pytest.approx(15e9 / 8 / 10e9)  # 187.5 ms, while NVLink needs 131.25
    assert cost.demand_by_wire[Wire.NODE_LINK] == pytest.approx(131.25 / 187.5)


def test_one_rank_of_each_node_has_one_adapter() -> None:
    of = machine(node_bytes_per_s=100e9, network_bytes_per_s=10e9)
    cost = transfer(of, "all_reduce", ring_of(range(0, 64, 8), 8), 8_000_000_000)
    assert cost.seconds == pytest.approx(1.4)
    assert cost.bytes_by_wire == {Wire.NETWORK: pytest.approx(14e9)}


def test_latency_is_that_of_the_way_around() -> None:
    """16 ranks on 2 nodes: 14 steps within nodes, 1 between them."""
    of = machine(node_latency_s=1e-6, network_latency_s=5e-6)
    assert transfer(of, "all_gather", ring_of(range(16), 8), 1024).seconds == pytest.approx(19e-6)


def test_a_small_all_reduce_goes_along_a_tree_and_a_large_one_around() -> None:
    """Up and down a tree of 8: 2 × 3 steps; around a ring twice 7."""
    of = machine(node_latency_s=1e-6, node_bytes_per_s=1e9)
    small = transfer(of, "all_reduce", ring_of(range(8), 8), 4)
    assert small.seconds == pytest.approx(6e-6 + 8e-9)
    assert small.bytes_by_wire == {Wire.NODE_LINK: 8}
    large = transfer(of, "all_reduce", ring_of(range(8), 8), 8_000_000)
    assert large.seconds == pytest.approx(14e-6 + 14e-3)


def test_a_measurement_takes_the_place_of_the_model_for_its_ranks_and_nodes() -> None:
    measured = {
        "kind": "all_gather",
        "ranks": 2,
        "nodes": 1,
        "alpha_s": 1.0,
        "beta_s_per_byte": 0.5,
        "source": "made up",
    }
    of = machine(collectives=[measured])
    assert transfer(of, "all_gather", ring_of(range(2), 8), 10).seconds == 6.0
    assert transfer(of, "all_gather", ring_of(range(3), 8), 10).seconds == 0.0
    assert transfer(of, "reduce_scatter", ring_of(range(2), 8), 10).seconds == 0.0


def test_alone_a_rank_only_copies() -> None:
    of = machine(memory_bytes_per_s=1e9, node_latency_s=1.0)
    cost = transfer(of, "all_gather", ring_of([3], 8), 1_000_000)
    assert cost.seconds == pytest.approx(2e-3)
    assert not cost.bytes_by_wire


def test_without_a_network_a_group_stays_within_a_node() -> None:
    with pytest.raises(UserError, match="has no network, so it takes at most 8 ranks"):
        transfer(machine(network=None), "all_gather", ring_of(range(9), 8), 1024)


@examples(40)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(2, 64),
    payload=st.integers(0, 10**9),
    node=st.floats(1e6, 1e12),
    network=st.floats(1e6, 1e12),
)
def test_no_wire_is_asked_for_more_than_it_has(
    kind: CollectiveKind, ranks: int, payload: int, node: float, network: float
) -> None:
    of = machine(node_bytes_per_s=node, network_bytes_per_s=network)
    cost = transfer(of, kind, ring_of(range(ranks), 8), payload)
    rates = {Wire.NODE_LINK: node, Wire.NETWORK: network}
    for wire, count in cost.bytes_by_wire.items():
        assert count <= cost.transfer_s * rates[wire] * (1 + 1e-9)
    assert all(0 <= demand <= 1 for demand in cost.demand_by_wire.values())
    assert not payload or max(cost.demand_by_wire.values()) == 1
