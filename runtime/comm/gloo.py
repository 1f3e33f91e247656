"""Collectives over gloo, with sums in rank order.

gloo's own reduce_scatter is an all-reduce and a slice whose order of additions depends on the position in the buffer,
and torch copies what the others of its collectives move once more on either side. So every rank sends each other rank
what is that one's, straight from where it is to where it belongs, and adds in rank order: fewer bytes, fewer copies,
and the same bits for any layout and any stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import SMALL_NUMEL, Launch, combine, to_wire
from zeroir.runtime.comm.groups import Groups


class GlooComm:
    """Collectives of one rank of a gloo world; ``groups`` holds one process group per communicator."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def all_gather(self, launch: Launch) -> None:
        """See ``Comm.all_gather``."""
        group = self._groups.by_comm[launch.comm]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in launch.pieces[0]]
        slots = [piece.destination.view(group.size(), -1).unbind() for piece in launch.pieces[0]]
        _gather(sources, slots, group)

    def reduce_scatter(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``."""
        group = self._groups.by_comm[launch.comm]
        rows = [
            to_wire(piece.source, launch.wire_dtype).view(group.size(), -1).unbind()
            for piece in launch.pieces[0]
        ]
        into = [piece.destination for piece in launch.pieces[0]]
        _reduce(rows, into, reduction, group, launch.staging[0])

    def all_reduce(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``: the reduce_scatter above and an all_gather."""
        group = self._groups.by_comm[launch.comm]
        size, own = group.size(), group.rank()
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in launch.pieces[0]]
        destinations = [piece.destination for piece in launch.pieces[0]]
        if sum(source.numel() for source in sources) <= SMALL_NUMEL:
            _reduce([[source] * size for source in sources], destinations, reduction, group, None)
            return
        rows = [source.tensor_split(size) for source in sources]
        slots = [destination.tensor_split(size) for destination in destinations]
        _reduce(rows, [parts[own] for parts in slots], reduction, group, launch.staging[0])
        _gather([parts[own] for parts in slots], slots, group)

    def broadcast(self, launch: Launch, root: int) -> None:
        """See ``Comm.broadcast``."""
        group = self._groups.by_comm[launch.comm]
        for piece in launch.pieces[0]:
            message = to_wire(piece.source, launch.wire_dtype).clone()
            dist.broadcast(message, group=group, group_src=root)
            piece.destination.copy_(message)

    def close(self) -> None:
        """Destroy the process groups."""
        self._groups.close()


def _gather(
    sources: Sequence[Tensor], slots: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> None:
    """Bring the ``i``-th source of every rank to that rank's place in ``slots[i]``."""
    arrived = [
        [slot if _can_receive(slot, source) else _host_memory(slot.numel(), source) for slot in of]
        for source, of in zip(sources, slots, strict=True)
    ]
    _exchange([[source] * group.size() for source in sources], arrived, group)
    for source, received, of in zip(sources, arrived, slots, strict=True):
        for at, slot in enumerate(of):
            message = source if at == group.rank() else received[at]
            if message.data_ptr() != slot.data_ptr() or message.dtype != slot.dtype:
                slot.copy_(message)


def _reduce(
    rows: Sequence[Sequence[Tensor]],
    into: Sequence[Tensor],
    reduction: Reduction,
    group: ProcessGroup,
    staging: Tensor | None,
) -> None:
    """Send every rank its row of each tensor, and combine what all ranks have for this one."""
    own = group.rank()
    arrived: list[list[Tensor]] = []
    used = 0
    for of in rows:
        numel = group.size() * of[own].numel()
        # The program's own scratch where it gives enough.
        is_enough = staging is not None and used + numel <= staging.numel()
        if staging is not None and is_enough and _can_receive(staging, of[own]):
            memory = staging[used : used + numel]
            used += numel
        else:
            memory = _host_memory(numel, of[own])
        arrived.append(list(memory.view(group.size(), -1).unbind()))
    _exchange(rows, arrived, group)
    for of, received, destination in zip(rows, arrived, into, strict=True):
        received[own] = of[own]
        combine([part.to(destination.device) for part in received], reduction, destination)


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], group: ProcessGroup
) -> None:
    """Send each other rank its tensors, and receive from it as many; gloo takes them from and to the CPU's memory."""
    size, own = group.size(), group.rank()
    others = [(own + step) % size for step in range(1, size)]
    work = [
        dist.irecv(tensors[other], group=group, group_src=other)
        for other in others
        for tensors in incoming
        if tensors[other].numel()
    ]
    work += [
        dist.isend(tensors[other].cpu(), group=group, group_dst=other)
        for other in others
        for tensors in outgoing
        if tensors[other].numel()
    ]
    for one in work:
        assert one is not None  # this rank belongs to the group
        one.wait()


def _can_receive(memory: Tensor, message: Tensor) -> bool:
    return memory.device.type == "cpu" and memory.dtype == message.dtype


def _host_memory(numel: int, like: Tensor) -> Tensor:
    return torch.empty(numel, dtype=like.dtype)
