"""Collectives over NCCL, enqueued on the current CUDA stream.

NCCL chooses its own order of additions, so its results agree with the other backends within the rounding of the wire's
dtype, not bit for bit. All pairs of one dtype are launched together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import CollectiveTensors, TensorPair, to_wire
from zeroir.runtime.comm.collectives import all_gather_flat, broadcast, reduce_scatter_flat
from zeroir.runtime.comm.groups import destroy_groups


class NcclComm:
    """Collectives of one rank of an NCCL world, or of torch's fake process group, which transfers nothing."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = groups

    def all_gather(self, tensors: CollectiveTensors) -> None:
        group = self._groups[tensors.comm]
        _move(tensors, group, lambda target, source: all_gather_flat(target, source, group))

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        group, op = self._groups[tensors.comm], _REDUCE_OP[reduction]
        _move(tensors, group, lambda target, source: reduce_scatter_flat(target, source, group, op))

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        group, op = self._groups[tensors.comm], _REDUCE_OP[reduction]
        pairs = tensors.pairs[0]
        totals = [
            pair.destination
            if _is_in_place(pair, tensors.wire_dtype)
            else to_wire(pair.source, tensors.wire_dtype).clone()
            for pair in pairs
        ]
        for alike in _by_dtype(totals):
            with _one_launch(group, len(alike)):
                for i in alike:
                    dist.all_reduce(totals[i], op=op, group=group)
        _deliver(totals, pairs)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        broadcast(tensors, root, self._groups[tensors.comm])

    def close(self) -> None:
        """Destroy the process groups."""
        destroy_groups(self._groups)


_REDUCE_OP = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


def _move(
    tensors: CollectiveTensors, group: ProcessGroup, launch: Callable[[Tensor, Tensor], None]
) -> None:
    """Fill every destination from its source; ``launch`` starts one transfer between tensors of one dtype."""
    pairs = tensors.pairs[0]
    sources = [to_wire(pair.source, tensors.wire_dtype) for pair in pairs]
    targets = [_like(p.destination, s.dtype) for p, s in zip(pairs, sources, strict=True)]
    for alike in _by_dtype(sources):
        with _one_launch(group, len(alike)):
            for i in alike:
                launch(targets[i], sources[i])
    _deliver(targets, pairs)


def _by_dtype(tensors: Sequence[Tensor]) -> Sequence[Sequence[int]]:
    """Return the indices of the tensors of each dtype: torch only launches tensors of one dtype together."""
    positions: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.dtype, []).append(position)
    return list(positions.values())


def _one_launch(group: ProcessGroup, count: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which NCCL launches all collectives, which must be of one kind, together."""
    if count == 1:
        return contextlib.nullcontext()
    # Without a device torch passes all tensors to the backend in one call, and the current stream is ordered after them
    # when that returns. With a device it would record its events before NCCL's group is launched.
    manager: contextlib.AbstractContextManager[object] = distributed_c10d._coalescing_manager(
        group=group
    )
    return manager


def _like(destination: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the destination itself where it has the dtype that is sent, and otherwise new memory of that dtype."""
    is_alike = destination.dtype == dtype
    return destination if is_alike else torch.empty_like(destination, dtype=dtype)


def _deliver(arrived: Sequence[Tensor], pairs: Sequence[TensorPair]) -> None:
    """Convert every tensor that was not received directly in its destination."""
    for tensor, pair in zip(arrived, pairs, strict=True):
        if tensor is not pair.destination:
            pair.destination.copy_(tensor)


def _is_in_place(pair: TensorPair, wire_dtype: torch.dtype | None) -> bool:
    is_same_memory = pair.source.data_ptr() == pair.destination.data_ptr()
    return is_same_memory and wire_dtype in (None, pair.source.dtype)
