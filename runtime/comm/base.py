"""What a backend must do: carry out one collective for the ranks that this process drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

import torch
from torch import Tensor

from zeroir.ir.ops import Reduction
from zeroir.runtime.tensors import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Source and destination of one pair on one rank: flat, contiguous tensors, perhaps of one memory."""

    source: Tensor
    destination: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One collective with its tensors resolved.

    ``pieces[i]`` are the pairs of the i-th local rank, in the op's order; ``staging[i]`` its scratch, if the program
    gives one. ``wire_dtype`` is what travels (the source's type when None).
    """

    comm: str
    pieces: Sequence[Sequence[Piece]]
    staging: Sequence[Tensor | None]
    wire_dtype: torch.dtype | None = None


SMALL_NUMEL: Final = 1024
"""Up to so many elements every rank adds them all, which costs less than two exchanges; the bits are the same."""


class LostConnectionError(RuntimeError):
    """Another rank is gone, or late beyond the timeout."""


class Comm(Protocol):
    """Collectives over the communicators of one program.

    A call is done, or enqueued on the current device stream, when it returns. Sums follow one rule: contributions are
    added in FP32 in rank order and rounded once to the destination's dtype.
    """

    def all_gather(self, launch: Launch) -> None:
        """Per pair: destination = every rank's source, concatenated in coordinate order."""

    def reduce_scatter(self, launch: Launch, reduction: Reduction) -> None:
        """Per pair: destination = this coordinate's slice of the combined sources."""

    def all_reduce(self, launch: Launch, reduction: Reduction) -> None:
        """Per pair: destination = the combined sources."""

    def broadcast(self, launch: Launch, root: int) -> None:
        """Per pair: destination = the source of coordinate ``root``."""

    def close(self) -> None:
        """Give up what the backend holds; nothing may be called afterwards."""


def to_wire(tensor: Tensor, wire_dtype: torch.dtype | None) -> Tensor:
    """The tensor as it travels: itself, or converted to the wire's dtype."""
    return tensor if wire_dtype is None else tensor.to(wire_dtype)


def combine(parts: Iterable[Tensor], reduction: Reduction, destination: Tensor) -> None:
    """Write the combination of equally long parts, in their order, to ``destination``; rounds once.

    Three parts at most are held at a time. ``destination`` may be the memory of one of them.
    """
    fold: Callable[..., Tensor]
    match reduction:
        case Reduction.SUM:
            fold = torch.add
        case Reduction.MAX:
            fold = torch.maximum
        case _:
            assert_never(reduction)
    # By the destination, not by the parts: a wider wire must not change the sum.
    wide = accumulation_dtype(destination.dtype)
    following = iter(parts)
    total, part = next(following), next(following, None)
    scratch: Tensor | None = None
    while part is not None:
        after = next(following, None)
        # Two numbers of 16 bits have the same sum, rounded once, whether or not they are widened first.
        if after is not None or not total.dtype == part.dtype == destination.dtype:
            total = total.to(wide)
        if after is None and total.dtype == destination.dtype:
            fold(total, part, out=destination)
            return
        scratch = torch.empty_like(total) if scratch is None else scratch
        total, part = fold(total, part, out=scratch), after
    destination.copy_(total)
