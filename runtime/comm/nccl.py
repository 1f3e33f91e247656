"""Collectives over NCCL, enqueued on the current CUDA stream.

NCCL chooses its own order of additions, so its results agree with the other backends within the rounding of the wire's
dtype, not bit for bit. All pairs of one dtype are launched together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from zeroir.ir.ops import Reduction
from zeroir.runtime.comm.base import CollectiveTensors, TensorPair, to_wire
from zeroir.runtime.comm.collectives import all_gather_flat, broadcast, reduce_scatter_flat
from zeroir.runtime.comm.groups import destroy_group


class Transport(Protocol):
    """The collectives of the ranks of one communicator, which each rank submits to its current stream."""

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """Fill ``target`` with the sources of all ranks, in their order."""

    def reduce_scatter(self, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        """Fill ``target`` with this rank's part of the reduction of all sources."""

    def all_reduce(self, values: Tensor, reduction: Reduction) -> None:
        """Replace values by their reduction over all ranks."""

    def broadcast(self, values: Tensor, root: int) -> None:
        """Replace values by those of the rank ``root`` of the communicator."""

    def one_launch(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which all collectives, which must be of one kind, are launched together."""

    def close(self) -> None:
        """Release the communicator."""


@dataclass(frozen=True, slots=True)
class GroupTransport:
    """Collectives of a process group of torch."""

    group: ProcessGroup

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        all_gather_flat(target, source, self.group)

    def reduce_scatter(self, target: Tensor, source: Tensor, reduction: Reduction) -> None:
        reduce_scatter_flat(target, source, self.group, _REDUCE_OP[reduction])

    def all_reduce(self, values: Tensor, reduction: Reduction) -> None:
        dist.all_reduce(values, op=_REDUCE_OP[reduction], group=self.group)

    def broadcast(self, values: Tensor, root: int) -> None:
        dist.broadcast(values, group=self.group, group_src=root)

    def one_launch(self) -> contextlib.AbstractContextManager[object]:
        # Without a device torch passes all tensors to the backend in one call, and the current stream is ordered after
        # them when that returns. With a device it would record its events before NCCL's group is launched.
        manager: contextlib.AbstractContextManager[object] = distributed_c10d._coalescing_manager(
            group=self.group
        )
        return manager

    def close(self) -> None:
        destroy_group(self.group)


class NcclComm:
    """Collectives of one rank of an NCCL world, or of torch's fake process group, which transfers nothing."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports

    @classmethod
    def of_groups(cls, groups: Mapping[str, ProcessGroup]) -> Self:
        """Return the collectives of process groups, by the names of communicators."""
        return cls({name: GroupTransport(group) for name, group in groups.items()})

    def all_gather(self, tensors: CollectiveTensors) -> None:
        transport = self._transports[tensors.comm]
        _move(tensors, transport, transport.all_gather)

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        transport = self._transports[tensors.comm]
        _move(
            tensors,
            transport,
            lambda target, source: transport.reduce_scatter(target, source, reduction),
        )

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        transport = self._transports[tensors.comm]
        pairs = tensors.pairs[0]
        totals = [
            pair.destination
            if _is_in_place(pair, tensors.wire_dtype)
            else to_wire(pair.source, tensors.wire_dtype).clone()
            for pair in pairs
        ]
        for alike in _by_dtype(totals):
            with _one_launch(transport, len(alike)):
                for i in alike:
                    transport.all_reduce(totals[i], reduction)
        _deliver(totals, pairs)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        transport = self._transports[tensors.comm]
        broadcast(tensors, lambda message: transport.broadcast(message, root))

    def close(self) -> None:
        """Release the communicators."""
        for transport in self._transports.values():
            transport.close()


_REDUCE_OP = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


def _move(
    tensors: CollectiveTensors, transport: Transport, launch: Callable[[Tensor, Tensor], None]
) -> None:
    """Fill every destination from its source; ``launch`` starts one transfer between tensors of one dtype."""
    pairs = tensors.pairs[0]
    sources = [to_wire(pair.source, tensors.wire_dtype) for pair in pairs]
    targets = [_like(p.destination, s.dtype) for p, s in zip(pairs, sources, strict=True)]
    for alike in _by_dtype(sources):
        with _one_launch(transport, len(alike)):
            for i in alike:
                launch(targets[i], sources[i])
    _deliver(targets, pairs)


def _by_dtype(tensors: Sequence[Tensor]) -> Sequence[Sequence[int]]:
    """Return the indices of the tensors of each dtype: torch only launches tensors of one dtype together."""
    positions: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.dtype, []).append(position)
    return list(positions.values())


def _one_launch(transport: Transport, count: int) -> contextlib.AbstractContextManager[object]:
    return transport.one_launch() if count > 1 else contextlib.nullcontext()


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
