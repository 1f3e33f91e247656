"""Collectives over gloo, with sums in rank order.

Gloo's own reduce_scatter is an all-reduce and a slice, and its order of additions depends on the position in the
buffer. For its other collectives torch makes one more copy on either side. So each rank sends every other rank its
slice straight from the source to the destination, and adds in rank order: fewer bytes, fewer copies, and the same bits
for any layout and any stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import SMALL_NUMEL, CollectiveTensors, combine, to_wire
from zeroir.runtime.comm.collectives import broadcast
from zeroir.runtime.comm.groups import destroy_groups


class GlooComm:
    """Collectives of one rank of a gloo world; ``groups`` holds one process group per communicator."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = groups

    def all_gather(self, tensors: CollectiveTensors) -> None:
        """See ``Comm.all_gather``."""
        group = self._groups[tensors.comm]
        sources = [to_wire(pair.source, tensors.wire_dtype) for pair in tensors.pairs[0]]
        slots = [pair.destination.view(group.size(), -1).unbind() for pair in tensors.pairs[0]]
        _gather(sources, slots, group)

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``."""
        group = self._groups[tensors.comm]
        rows = [
            to_wire(pair.source, tensors.wire_dtype).view(group.size(), -1).unbind()
            for pair in tensors.pairs[0]
        ]
        destinations = [pair.destination for pair in tensors.pairs[0]]
        _reduce(rows, destinations, reduction, group, tensors.staging[0])

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``: the reduce_scatter above and an all_gather."""
        group = self._groups[tensors.comm]
        size, own = group.size(), group.rank()
        sources = [to_wire(pair.source, tensors.wire_dtype) for pair in tensors.pairs[0]]
        destinations = [pair.destination for pair in tensors.pairs[0]]
        if sum(source.numel() for source in sources) <= SMALL_NUMEL:
            _reduce([[source] * size for source in sources], destinations, reduction, group, None)
            return
        rows = [source.tensor_split(size) for source in sources]
        slots = [destination.tensor_split(size) for destination in destinations]
        _reduce(rows, [parts[own] for parts in slots], reduction, group, tensors.staging[0])
        _gather([parts[own] for parts in slots], slots, group)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        """See ``Comm.broadcast``."""
        broadcast(tensors, root, self._groups[tensors.comm])

    def close(self) -> None:
        """Destroy the process groups."""
        destroy_groups(self._groups)


def _gather(
    sources: Sequence[Tensor], slots: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> None:
    """Copy the ``i``-th source of every rank to that rank's slot in ``slots[i]``."""
    arrived = [
        [
            slot if _can_receive(slot, source) else _host_memory(slot.numel(), source)
            for slot in source_slots
        ]
        for source, source_slots in zip(sources, slots, strict=True)
    ]
    _exchange([[source] * group.size() for source in sources], arrived, group)
    for source, received, source_slots in zip(sources, arrived, slots, strict=True):
        for rank, slot in enumerate(source_slots):
            message = source if rank == group.rank() else received[rank]
            if message.data_ptr() != slot.data_ptr() or message.dtype != slot.dtype:
                slot.copy_(message)


def _reduce(
    rows: Sequence[Sequence[Tensor]],
    destinations: Sequence[Tensor],
    reduction: Reduction,
    group: ProcessGroup,
    staging: Tensor | None,
) -> None:
    """Send every rank its row of each tensor, and combine the rows that the ranks send to this one."""
    own = group.rank()
    arrived: list[list[Tensor]] = []
    used = 0
    for tensor_rows in rows:
        numel = group.size() * tensor_rows[own].numel()
        # The program's staging buffer is used where it is large enough.
        is_enough = staging is not None and used + numel <= staging.numel()
        if staging is not None and is_enough and _can_receive(staging, tensor_rows[own]):
            memory = staging[used : used + numel]
            used += numel
        else:
            memory = _host_memory(numel, tensor_rows[own])
        arrived.append(list(memory.view(group.size(), -1).unbind()))
    _exchange(rows, arrived, group)
    for tensor_rows, received, destination in zip(rows, arrived, destinations, strict=True):
        received[own] = tensor_rows[own]
        combine([part.to(destination.device) for part in received], reduction, destination)


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> None:
    """Send every other rank its tensors, and receive as many from it; gloo moves them between CPU memories."""
    size, own = group.size(), group.rank()
    peers = [(own + step) % size for step in range(1, size)]
    transfers = [
        dist.irecv(tensors[peer], group=group, group_src=peer)
        for peer in peers
        for tensors in incoming
        if tensors[peer].numel()
    ]
    transfers += [
        dist.isend(tensors[peer].cpu(), group=group, group_dst=peer)
        for peer in peers
        for tensors in outgoing
        if tensors[peer].numel()
    ]
    for transfer in transfers:
        assert transfer is not None  # this rank belongs to the group
        transfer.wait()


def _can_receive(memory: Tensor, message: Tensor) -> bool:
    return memory.device.type == "cpu" and memory.dtype == message.dtype


def _host_memory(numel: int, like: Tensor) -> Tensor:
    return torch.empty(numel, dtype=like.dtype)
