"""The time of a collective: the alpha-beta model of rings, with the bus-bandwidth factors of nccl-tests.

The factors are those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: of a full buffer of S
bytes, every one of n ranks sends S(n-1)/n in an all-gather or a reduce-scatter, 2S(n-1)/n in an all-reduce, and S in a
broadcast. A ring over several nodes leaves each node once, through one network adapter for each rank of the group on
the node. So where g ranks share a node, a rank sends 1/g of its bytes over the network and the rest within the node.
Both transfers overlap, and the slower one determines the time. A small all-reduce uses a double binary tree where that
is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroir.cost.machine import CollectiveKind, Link, Machine
from zeroir.cost.wires import FlowCost, Wire, host_rates
from zeroir.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of a group: their number, the number of their nodes, and the fewest and most of them on one node."""

    ranks: int
    nodes: int
    fewest: int
    most: int


def ring_of(ranks: Sequence[int], node_ranks: int) -> Ring:
    """Return the ring of a group of ranks; rank r is on node r // ``node_ranks``."""
    counts = Counter(rank // node_ranks for rank in ranks)
    return Ring(
        ranks=len(ranks),
        nodes=len(counts),
        fewest=min(counts.values()),
        most=max(counts.values()),
    )


def transfer(machine: Machine, kind: CollectiveKind, ring: Ring, payload_bytes: int) -> FlowCost:
    """Return the cost of a collective over the ring; ``payload_bytes`` are those of the full buffers.

    Raises:
        UserError: if the ring leaves a node of a machine without a network.
    """
    sent = _sent_bytes(kind, ring.ranks, payload_bytes)
    key = kind, ring.ranks, ring.nodes
    found = next((each for each in machine.collectives if each.key == key), None)
    measured = None if found is None else (found.alpha_s, found.beta_s_per_byte * payload_bytes)
    if ring.ranks == 1:
        # A single rank copies: one read and one write.
        copied_s = 2 * payload_bytes / machine.memory.achieved_bytes_per_s
        latency_s, transfer_s = (0.0, copied_s) if measured is None else measured
        return FlowCost(
            latency_s=latency_s,
            transfer_s=transfer_s,
            bytes_by_wire={},
            demand_by_wire={},
            is_measured=measured is not None,
        )
    bytes_by_wire = _bytes_by_wire(ring, sent)
    busy = {
        wire: count / _link(machine, wire).achieved_bytes_per_s
        for wire, count in bytes_by_wire.items()
    }
    latency_s, transfer_s = _latency_s(machine, kind, ring), max(busy.values())
    if kind == "all_reduce":
        tree_latency_s = _tree_latency_s(machine, ring)
        tree_transfer_s = transfer_s * ring.ranks / (ring.ranks - 1)
        if tree_latency_s + tree_transfer_s < latency_s + transfer_s:
            latency_s, transfer_s = tree_latency_s, tree_transfer_s
            bytes_by_wire = _bytes_by_wire(ring, 2 * payload_bytes)
    if measured is not None:
        latency_s, transfer_s = measured
    slowest = max(busy.values())
    if machine.node_link.through_host:
        busy |= _host_busy_s(machine, bytes_by_wire.get(Wire.NODE_LINK, 0.0))
    return FlowCost(
        latency_s=latency_s,
        transfer_s=transfer_s,
        bytes_by_wire=bytes_by_wire,
        # The rate of a link through the host already takes the host into account.
        demand_by_wire={wire: min(1.0, t / slowest) for wire, t in busy.items() if slowest},
        is_measured=measured is not None,
    )


def _sent_bytes(kind: CollectiveKind, ranks: int, payload_bytes: int) -> float:
    match kind:
        case "all_gather" | "reduce_scatter":
            return payload_bytes * (ranks - 1) / ranks
        case "all_reduce":
            return 2 * payload_bytes * (ranks - 1) / ranks
        case "broadcast":
            return payload_bytes


def _bytes_by_wire(ring: Ring, sent: float) -> Mapping[Wire, float]:
    """Return the bytes that the rank that sends most sends over each wire."""
    if ring.nodes == 1:
        return {Wire.NODE_LINK: sent}
    bytes_by_wire = {Wire.NETWORK: sent / ring.fewest}
    if ring.most > 1:
        bytes_by_wire[Wire.NODE_LINK] = sent * (ring.most - 1) / ring.most
    return bytes_by_wire


def _host_busy_s(machine: Machine, sent: float) -> Mapping[Wire, float]:
    """Return the seconds that bytes through the host occupy its wires on a full node.

    Each byte is written and read there.
    """
    rates = host_rates(machine, machine.node_ranks).bytes_per_s
    crossed = {Wire.TO_HOST: 1, Wire.TO_DEVICE: 1, Wire.HOST_LINK: 2, Wire.HOST_MEMORY: 2}
    return {wire: times * sent / rates[wire] for wire, times in crossed.items()}


def _latency_s(machine: Machine, kind: CollectiveKind, ring: Ring) -> float:
    """Return the seconds for the first byte to travel once around the ring."""
    inside, between = ring.ranks - ring.nodes, ring.nodes - 1
    once = inside * machine.node_link.latency_s.value
    if between:
        once += between * _link(machine, Wire.NETWORK).latency_s.value
    return 2 * once if kind == "all_reduce" else once


def _tree_latency_s(machine: Machine, ring: Ring) -> float:
    """Return the seconds up and down a tree."""
    once = math.ceil(math.log2(ring.most)) * machine.node_link.latency_s.value
    if ring.nodes > 1:
        once += math.ceil(math.log2(ring.nodes)) * _link(machine, Wire.NETWORK).latency_s.value
    return 2 * once


def _link(machine: Machine, wire: Wire) -> Link:
    if wire is Wire.NODE_LINK:
        return machine.node_link
    if machine.network is None:
        raise UserError(
            f"The machine {machine.name} has no network, so it takes at most {machine.node_ranks} ranks: "
            "choose another one, or compile for fewer ranks."
        )
    return machine.network
