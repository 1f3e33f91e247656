"""Collectives over NCCL, enqueued on the current CUDA stream.

NCCL adds in an order of its own, so results agree with the other backends within the rounding of the wire's dtype,
not bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import Launch, Piece, to_wire
from zeroir.runtime.comm.collectives import all_gather_flat, reduce_scatter_flat
from zeroir.runtime.comm.groups import Groups


class NcclComm:
    """Collectives of one rank of an NCCL world. Also drives torch's fake process group, which moves nothing."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def all_gather(self, launch: Launch) -> None:
        """See ``Comm.all_gather``. All pairs of one dtype are one launch."""
        group = self._group(launch)
        pieces = launch.pieces[0]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in pieces]
        targets = [_like(p.destination, s.dtype) for p, s in zip(pieces, sources, strict=True)]
        for alike in _by_dtype(sources):
            with _one_launch(group, len(alike)):
                for i in alike:
                    all_gather_flat(targets[i], sources[i], group)
        _deliver(targets, pieces)

    def reduce_scatter(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.reduce_scatter``. All pairs of one dtype are one launch."""
        group = self._group(launch)
        pieces = launch.pieces[0]
        sources = [to_wire(piece.source, launch.wire_dtype) for piece in pieces]
        targets = [_like(p.destination, s.dtype) for p, s in zip(pieces, sources, strict=True)]
        for alike in _by_dtype(sources):
            with _one_launch(group, len(alike)):
                for i in alike:
                    reduce_scatter_flat(targets[i], sources[i], group, _REDUCE_OP[reduction])
        _deliver(targets, pieces)

    def all_reduce(self, launch: Launch, reduction: Reduction) -> None:
        """See ``Comm.all_reduce``. All pairs of one dtype are one launch."""
        group = self._group(launch)
        pieces = launch.pieces[0]
        totals = [
            piece.destination
            if _is_in_place(piece, launch.wire_dtype)
            else to_wire(piece.source, launch.wire_dtype).clone()
            for piece in pieces
        ]
        for alike in _by_dtype(totals):
            with _one_launch(group, len(alike)):
                for i in alike:
                    dist.all_reduce(totals[i], op=_REDUCE_OP[reduction], group=group)
        _deliver(totals, pieces)

    def broadcast(self, launch: Launch, root: int) -> None:
        """See ``Comm.broadcast``."""
        group = self._group(launch)
        for piece in launch.pieces[0]:
            message = to_wire(piece.source, launch.wire_dtype).clone()
            dist.broadcast(message, group=group, group_src=root)
            piece.destination.copy_(message)

    def close(self) -> None:
        """Destroy the process groups."""
        self._groups.close()

    def _group(self, launch: Launch) -> ProcessGroup:
        return self._groups.by_comm[launch.comm]


_REDUCE_OP = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


def _by_dtype(tensors: Sequence[Tensor]) -> Sequence[Sequence[int]]:
    """The positions of the tensors of each dtype: torch takes only those of one dtype together."""
    found: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(position)
    return list(found.values())


def _one_launch(group: ProcessGroup, count: int) -> contextlib.AbstractContextManager[object]:
    """A block whose collectives, all of one kind, NCCL takes together."""
    if count == 1:
        return contextlib.nullcontext()
    # Without a device: torch then hands the backend all tensors in one call, which returns with the current stream
    # in order. With one it opens a group of NCCL's and records its events before the group is launched.
    manager: contextlib.AbstractContextManager[object] = distributed_c10d._coalescing_manager(
        group=group
    )
    return manager


def _like(destination: Tensor, dtype: torch.dtype) -> Tensor:
    """The destination itself where it has the dtype that travels, else memory of that dtype."""
    is_alike = destination.dtype == dtype
    return destination if is_alike else torch.empty_like(destination, dtype=dtype)


def _deliver(arrived: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Convert what did not arrive in its destination."""
    for tensor, piece in zip(arrived, pieces, strict=True):
        if tensor is not piece.destination:
            piece.destination.copy_(tensor)


def _is_in_place(piece: Piece, wire_dtype: torch.dtype | None) -> bool:
    is_same_memory = piece.source.data_ptr() == piece.destination.data_ptr()
    return is_same_memory and wire_dtype in (None, piece.source.dtype)
