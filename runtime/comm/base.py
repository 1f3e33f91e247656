"""The interface of a communication backend, and the reduction of the backends with a fixed order of additions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

import torch
from torch import Tensor

from zeroir.ir.ops import Reduction
from zeroir.runtime.memory.tensors import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """Source and destination of one pair on one rank: flat, contiguous tensors, which may share memory."""

    source: Tensor
    destination: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTensors:
    """The tensors of one collective, for every local rank.

    ``pairs[i]`` are the pairs of the i-th local rank, in the op's order; ``staging[i]`` is its scratch memory, if the
    program provides any. ``wire_dtype`` is the dtype that is sent; None stands for the source's own.
    """

    comm: str
    pairs: Sequence[Sequence[TensorPair]]
    staging: Sequence[Tensor | None]
    wire_dtype: torch.dtype | None = None


SMALL_NUMEL: Final = 1024
"""The largest all-reduce that adds all elements on every rank: cheaper than two exchanges, with bitwise equal results.
"""


class LostConnectionError(RuntimeError):
    """Another rank has ended, or did not answer within the timeout."""


class DifferentCollectivesError(RuntimeError):
    """Another rank called a different collective."""


class Comm(Protocol):
    """Collectives over the communicators of one program.

    When a call returns, the collective is done or enqueued on the current device stream. Contributions are added in
    FP32, in rank order, and the sum is rounded once to the destination's dtype; NCCL alone has an order of its own.
    """

    def all_gather(self, tensors: CollectiveTensors) -> None:
        """Concatenate every rank's source in coordinate order into the destination, for each pair."""

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """Reduce the sources, and write this coordinate's slice to the destination, for each pair."""

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        """Reduce the sources, and write the result to the destination, for each pair."""

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        """Copy the source of coordinate ``root`` to the destination, for each pair."""

    def close(self) -> None:
        """Release the backend's resources; no other method may be called afterwards."""


def to_wire(tensor: Tensor, wire_dtype: torch.dtype | None) -> Tensor:
    """Return the tensor as it is sent: itself, or converted to ``wire_dtype``."""
    return tensor if wire_dtype is None else tensor.to(wire_dtype)


def as_sent(tensor: Tensor) -> Tensor:
    """Return a flat tensor in a dtype that torch's backends send: floats of 8 bits as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def combine(parts: Iterable[Tensor], reduction: Reduction, destination: Tensor) -> None:
    """Reduce parts of equal length, in their order, into ``destination``, and round once.

    At most three parts are held at a time. ``destination`` may share memory with one of them.
    """
    operation: Callable[..., Tensor]
    match reduction:
        case Reduction.SUM:
            operation = torch.add
        case Reduction.MAX:
            operation = torch.maximum
        case _:
            assert_never(reduction)
    # The destination's dtype decides, not that of the parts: a wider wire dtype must not change the sum.
    wide = accumulation_dtype(destination.dtype)
    following = iter(parts)
    total, part = next(following), next(following, None)
    scratch: Tensor | None = None
    while part is not None:
        after = next(following, None)
        # Converting two 16-bit numbers to FP32 first does not change their sum, rounded once.
        if after is not None or not total.dtype == part.dtype == destination.dtype:
            total = total.to(wide)
        if after is None and total.dtype == destination.dtype:
            operation(total, part, out=destination)
            return
        scratch = torch.empty_like(total) if scratch is None else scratch
        total, part = operation(total, part, out=scratch), after
    destination.copy_(total)
