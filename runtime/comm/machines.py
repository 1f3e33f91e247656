"""Collectives on CPUs of several machines: ranks of one machine read each other's memory, gloo connects machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from zeroir.ir.ops import Reduction
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import CollectiveTensors, Comm
from zeroir.runtime.comm.gloo import GlooComm
from zeroir.runtime.comm.groups import make_groups
from zeroir.runtime.comm.peer_group import PeerGroup
from zeroir.runtime.comm.peer_memory import PeerMemoryComm
from zeroir.runtime.comm.peers import Exchange, connect_peers


def open_machines(
    program: Program,
    rank: int,
    exchange: Exchange,
    timeout: timedelta,
    *,
    is_one_needed: bool = False,
) -> tuple[Comm, Sequence[Sequence[int]]] | None:
    """Open the collectives of every communicator; return them and the machines, as lists of ranks, equal on all ranks.

    All ranks call this together. ``timeout`` bounds the wait for a rank in a collective. With ``is_one_needed`` the
    result is None, on all ranks, where there are several machines.
    """
    groups = {
        comm.name: next(group for group in program.mesh.groups(comm.axis) if rank in group)
        for comm in program.comms
    }
    others = [[peer for peer in group if peer != rank] for group in groups.values()]
    connected = connect_peers(rank, others, exchange, timeout)
    if is_one_needed and len(connected.machines) > 1:
        for peers in connected.peers:
            for peer in peers.values():
                peer.close()
        return None
    machine_of = {
        peer: index for index, machine in enumerate(connected.machines) for peer in machine
    }

    def is_across(members: Sequence[int]) -> bool:
        return len({machine_of[member] for member in members}) > 1

    near = {
        name: PeerGroup(
            name=name,
            coordinate=group.index(rank),
            size=len(group),
            peers={group.index(peer_rank): peer for peer_rank, peer in peers.items()},
            machines=[machine_of[member] for member in group],
        )
        for (name, group), peers in zip(groups.items(), connected.peers, strict=True)
    }
    gloo_groups = make_groups(program, "gloo", timeout, is_needed=is_across)
    within = PeerMemoryComm({name: near[name] for name in groups.keys() - gloo_groups.keys()})
    if not gloo_groups:
        return within, connected.machines
    across = GlooComm(gloo_groups, {name: near[name] for name in gloo_groups})
    comms: dict[str, Comm] = {name: across if name in gloo_groups else within for name in groups}
    return MachinesComm(comms), connected.machines


class MachinesComm:
    """The collectives of one rank; each communicator is within one machine or spans several."""

    def __init__(self, comms: Mapping[str, Comm]) -> None:
        self._comms = comms

    def all_gather(self, tensors: CollectiveTensors) -> None:
        self._comms[tensors.comm].all_gather(tensors)

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        self._comms[tensors.comm].reduce_scatter(tensors, reduction)

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        self._comms[tensors.comm].all_reduce(tensors, reduction)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        self._comms[tensors.comm].broadcast(tensors, root)

    def close(self) -> None:
        """Close the backends of all communicators."""
        for comm in {id(comm): comm for comm in self._comms.values()}.values():
            comm.close()
