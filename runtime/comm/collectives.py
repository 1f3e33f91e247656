"""Torch's collectives on flat tensors, whose names differ between the versions of torch that zeroir supports.

torch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` and deprecated the old names; torch 2.11 has
only the old ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroir.runtime.comm.base import CollectiveTensors, as_sent, to_wire

_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_flat(destination: Tensor, source: Tensor, group: ProcessGroup) -> None:
    """Concatenate every rank's ``source`` into ``destination``, which has group size times as many elements."""
    _all_gather(as_sent(destination), as_sent(source), group=group)


def reduce_scatter_flat(
    destination: Tensor, source: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType
) -> None:
    """Reduce every rank's ``source``, and keep this rank's slice; the backend determines the order of additions."""
    _reduce_scatter(destination, source, op=op, group=group)


def broadcast(tensors: CollectiveTensors, send: Callable[[Tensor], object]) -> None:
    """Send the source of each pair, or replace it by the one that is sent, and write it to the destination."""
    for pair in tensors.pairs[0]:
        message = to_wire(pair.source, tensors.wire_dtype).clone()
        send(as_sent(message))
        pair.destination.copy_(message)
