"""Collectives over gloo, with sums in rank order.

gloo's own reduce_scatter is an all-reduce and a slice whose order of additions depends on the position in the
buffer. Here every rank sends each slice to its owner (``all_to_all_single``), who adds in rank order: a third of the
bytes at four ranks, and the same bits for any layout and any stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import Launch, Piece, combine, to_wire
from zeroir.runtime.comm.collectives import all_gather_flat
from zeroir.runtime.comm.groups import Groups

# Below this many elements one all-gather and local adds cost less than two collectives; the bits are the same.
_SMALL_NUMEL = 1024


class GlooComm:
    """Collectives of one rank of a gloo world; ``groups`` holds one process group per communicator."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def all_gather(self, launch: Launch) -> None:
        """See ``Comm.all_gather``. Several pairs travel as one message."""
        group, size = self._group(launch)
        pieces = launch.pieces[0]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in pieces]
        if len(pieces) == 1:
            piece, source = pieces[0], sources[0]
            if piece.destination.dtype == source.dtype:
                all_gather_flat(piece.destination, source, group)
                return
        numel = sum(source.numel() for source in sources)
        gathered = _scratch(launch, size * numel, sources[0])
        all_gather_flat(gathered, _joined(sources), group)
        _spread(gathered.view(size, numel), pieces)

    def reduce_scatter(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``. Several pairs travel as one message."""
        group, size = self._group(launch)
        pieces = launch.pieces[0]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in pieces]
        # One row per owner, holding that owner's slice of every pair.
        rows = [source.view(size, -1) for source in sources]
        outgoing = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        incoming = _scratch(launch, outgoing.numel(), outgoing).view_as(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        start = 0
        for piece in pieces:
            stop = start + piece.destination.numel()
            parts = [incoming[rank, start:stop] for rank in range(size)]
            combine(parts, reduction, piece.destination)
            start = stop

    def all_reduce(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``: the reduce_scatter above and an all_gather."""
        group, size = self._group(launch)
        pieces = launch.pieces[0]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in pieces]
        numel = sum(source.numel() for source in sources)
        result_dtype = pieces[0].destination.dtype
        if numel <= _SMALL_NUMEL:
            gathered = sources[0].new_empty(size * numel)
            all_gather_flat(gathered, _joined(sources), group)
            total = sources[0].new_empty(numel, dtype=result_dtype)
            combine(gathered.chunk(size), reduction, total)
        else:
            total = _all_reduce_flat(_joined(sources), result_dtype, reduction, group, size)
        start = 0
        for piece in pieces:
            stop = start + piece.destination.numel()
            piece.destination.copy_(total[start:stop])
            start = stop

    def broadcast(self, launch: Launch, root: int) -> None:
        """See ``Comm.broadcast``."""
        group, _ = self._group(launch)
        for piece in launch.pieces[0]:
            message = to_wire(piece.source, launch.wire_dtype).clone()
            dist.broadcast(message, group=group, group_src=root)
            piece.destination.copy_(message)

    def close(self) -> None:
        """Destroy the process groups."""
        self._groups.close()

    def _group(self, launch: Launch) -> tuple[ProcessGroup, int]:
        group = self._groups.by_comm[launch.comm]
        return group, group.size()


def _all_reduce_flat(
    source: Tensor, dtype: torch.dtype, reduction: Reduction, group: ProcessGroup, size: int
) -> Tensor:
    """The combined sources, in ``dtype``; every element is rounded once, by its owner."""
    padding = -source.numel() % size
    if padding:
        source = torch.nn.functional.pad(source, (0, padding))
    outgoing = source.view(size, -1)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    own = source.new_empty(outgoing.shape[1], dtype=dtype)
    combine(list(incoming), reduction, own)
    total = source.new_empty(source.numel(), dtype=dtype)
    all_gather_flat(total, own, group)
    return total


def _joined(sources: Sequence[Tensor]) -> Tensor:
    return sources[0] if len(sources) == 1 else torch.cat(list(sources))


def _scratch(launch: Launch, numel: int, like: Tensor) -> Tensor:
    """Memory for elements of the same dtype, on the same device: the program's own where it gives enough."""
    staging = launch.staging[0]
    if staging is not None and staging.dtype == like.dtype and staging.numel() >= numel:
        return staging[:numel]
    return like.new_empty(numel)


def _spread(gathered: Tensor, pieces: Sequence[Piece]) -> None:
    """Copy columns of ``gathered`` (one row per rank) to the pieces' destinations."""
    start = 0
    for piece in pieces:
        stop = start + piece.source.numel()
        piece.destination.view(gathered.shape[0], -1).copy_(gathered[:, start:stop])
        start = stop
