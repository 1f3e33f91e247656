"""Collectives over gloo, with sums in rank order.

Gloo's own reduce_scatter is an all-reduce and a slice, and its order of additions depends on the position in the
buffer. For its other collectives torch makes an extra copy on either side. So each rank sends every other rank its
slice directly from the source to the destination, and adds in rank order: fewer bytes, fewer copies, and the same bits
for any layout and any stage.

Where several ranks of a group are on one machine, they read each other's memory instead of sending. An all-gather then
sends each source to each machine once: the ranks of a machine divide the receiving among them, and read the rest from
each other. The order of additions is still that of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import SMALL_NUMEL, CollectiveTensors, as_sent, combine, to_wire
from zeroir.runtime.comm.collectives import broadcast
from zeroir.runtime.comm.groups import destroy_group
from zeroir.runtime.comm.peer_group import PeerGroup, SharedTensors, in_short


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """The connections of one communicator: gloo to ``far`` ranks, and readable memory of ``near`` ranks, if any."""

    group: ProcessGroup
    near: PeerGroup | None

    @property
    def far(self) -> Sequence[int]:
        """The coordinates that only gloo reaches, starting after this rank's, so that ranks do not all send to one."""
        size, own = self.group.size(), self.group.rank()
        near = () if self.near is None else self.near.peers
        following = ((own + step) % size for step in range(1, size))
        return [coordinate for coordinate in following if coordinate not in near]


class GlooComm:
    """Collectives of one rank of a gloo world.

    ``groups`` has one process group for each communicator. ``near`` has, for communicators on the CPU, the ranks that
    read each other's memory.
    """

    def __init__(
        self, groups: Mapping[str, ProcessGroup], near: Mapping[str, PeerGroup] | None = None
    ) -> None:
        self._near = near or {}
        self._links = {
            name: _Links(group=group, near=self._near.get(name)) for name, group in groups.items()
        }

    def all_gather(self, tensors: CollectiveTensors) -> None:
        links = self._links[tensors.comm]
        sources = [to_wire(pair.source, tensors.wire_dtype) for pair in tensors.pairs[0]]
        slots = [
            pair.destination.view(links.group.size(), -1).unbind() for pair in tensors.pairs[0]
        ]
        _gather(sources, slots, links)

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        links = self._links[tensors.comm]
        rows = [
            to_wire(pair.source, tensors.wire_dtype).view(links.group.size(), -1).unbind()
            for pair in tensors.pairs[0]
        ]
        destinations = [pair.destination for pair in tensors.pairs[0]]
        _reduce(rows, destinations, reduction, links, tensors.staging[0])

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """Reduce with the ``reduce_scatter`` above, and gather the slices."""
        links = self._links[tensors.comm]
        size, own = links.group.size(), links.group.rank()
        sources = [to_wire(pair.source, tensors.wire_dtype) for pair in tensors.pairs[0]]
        destinations = [pair.destination for pair in tensors.pairs[0]]
        if sum(source.numel() for source in sources) <= SMALL_NUMEL:
            _reduce([[source] * size for source in sources], destinations, reduction, links, None)
            return
        rows = [source.tensor_split(size) for source in sources]
        slots = [destination.tensor_split(size) for destination in destinations]
        _reduce(rows, [parts[own] for parts in slots], reduction, links, tensors.staging[0])
        _gather([parts[own] for parts in slots], slots, links)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        group = self._links[tensors.comm].group
        broadcast(tensors, lambda message: dist.broadcast(message, group=group, group_src=root))

    def close(self) -> None:
        """Destroy the process groups, and close the channels to the ranks on this machine."""
        for peer_group in self._near.values():
            peer_group.close()
        for links in self._links.values():
            destroy_group(links.group)


def _gather(sources: Sequence[Tensor], slots: Sequence[Sequence[Tensor]], links: _Links) -> None:
    """Copy the ``i``-th source of every rank to that rank's slot in ``slots[i]``."""
    own = links.group.rank()
    arrived = [
        [
            slot if _can_receive(slot, source) else _host_memory(slot.numel(), source)
            for slot in source_slots
        ]
        for source, source_slots in zip(sources, slots, strict=True)
    ]
    if links.near is None:
        outgoing = [[source] * links.group.size() for source in sources]
        _exchange(outgoing, arrived, links)
    else:
        _gather_by_machine(sources, arrived, links.near, links.group)
    for source, received, source_slots in zip(sources, arrived, slots, strict=True):
        for rank, slot in enumerate(source_slots):
            message = source if rank == own else received[rank]
            if message.data_ptr() != slot.data_ptr() or message.dtype != slot.dtype:
                slot.copy_(message)


def _gather_by_machine(
    sources: Sequence[Tensor],
    arrived: Sequence[Sequence[Tensor]],
    near: PeerGroup,
    group: ProcessGroup,
) -> None:
    """Receive every other rank's sources in its slots of ``arrived``: from other machines once, then from this machine.

    On a machine with n ranks, the source of coordinate c is received by rank c modulo n of these.
    """
    own, machine = near.coordinate, near.machines[near.coordinate]

    def receiver(coordinate: int, on_machine: int) -> int:
        members = near.members(on_machine)
        return members[coordinate % len(members)]

    far = [at for at in range(near.size) if near.machines[at] != machine]
    transfers = _receiving(arrived, [at for at in far if receiver(at, machine) == own], group)
    far_machines = sorted({near.machines[at] for at in far})
    outgoing = [[source] * near.size for source in sources]
    transfers += _sending(outgoing, [receiver(own, other) for other in far_machines], group)
    _complete(transfers)
    if not near.peers:
        return
    held = [
        source if at == own else received[at]
        for source, received in zip(sources, arrived, strict=True)
        for at in range(near.size)
    ]
    shared = SharedTensors(near, f"all_gather of {in_short(held)}", held)
    for peer in near.peers:
        for at in [peer, *(at for at in far if receiver(at, machine) == peer)]:
            for index, received in enumerate(arrived):
                if received[at].numel():
                    shared.read(peer, index * near.size + at, 0, received[at])
    shared.agree()


def _reduce(
    rows: Sequence[Sequence[Tensor]],
    destinations: Sequence[Tensor],
    reduction: Reduction,
    links: _Links,
    staging: Tensor | None,
) -> None:
    """Send every rank its row of each tensor, and reduce the rows that this rank receives."""
    size, own = links.group.size(), links.group.rank()
    arrived: list[list[Tensor]] = []
    used = 0
    for tensor_rows in rows:
        numel = size * tensor_rows[own].numel()
        # Use the program's staging buffer where it is large enough.
        is_enough = staging is not None and used + numel <= staging.numel()
        if staging is not None and is_enough and _can_receive(staging, tensor_rows[own]):
            memory = staging[used : used + numel]
            used += numel
        else:
            memory = _host_memory(numel, tensor_rows[own])
        arrived.append(list(memory.view(size, -1).unbind()))
    _exchange(rows, arrived, links)
    for tensor_rows, received, destination in zip(rows, arrived, destinations, strict=True):
        received[own] = tensor_rows[own]
        combine([part.to(destination.device) for part in received], reduction, destination)


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], links: _Links
) -> None:
    """Send every other rank its tensors, and receive as many from it; gloo transfers between CPU memories."""
    near, far = links.near, links.far
    transfers = _receiving(incoming, far, links.group) + _sending(outgoing, far, links.group)
    if near is not None and near.peers:
        sent = [tensor for tensors in outgoing for tensor in tensors]
        shared = SharedTensors(near, f"exchange of {in_short(sent)}", sent)
        for peer in near.peers:
            for index, tensors in enumerate(incoming):
                if tensors[peer].numel():
                    shared.read(peer, index * near.size + near.coordinate, 0, tensors[peer])
        shared.agree()
    _complete(transfers)


def _receiving(
    incoming: Sequence[Sequence[Tensor]], peers: Sequence[int], group: ProcessGroup
) -> list[dist.Work | None]:
    """Start to receive the tensors of each of these ranks."""
    return [
        dist.irecv(as_sent(tensors[peer]), group=group, group_src=peer)
        for peer in peers
        for tensors in incoming
        if tensors[peer].numel()
    ]


def _sending(
    outgoing: Sequence[Sequence[Tensor]], peers: Sequence[int], group: ProcessGroup
) -> list[dist.Work | None]:
    """Start to send each of these ranks its tensors."""
    return [
        dist.isend(as_sent(tensors[peer].cpu()), group=group, group_dst=peer)
        for peer in peers
        for tensors in outgoing
        if tensors[peer].numel()
    ]


def _complete(transfers: Sequence[dist.Work | None]) -> None:
    for transfer in transfers:
        assert transfer is not None  # this rank belongs to the group
        transfer.wait()


def _can_receive(memory: Tensor, message: Tensor) -> bool:
    return memory.device.type == "cpu" and memory.dtype == message.dtype


def _host_memory(numel: int, like: Tensor) -> Tensor:
    return torch.empty(numel, dtype=like.dtype)
