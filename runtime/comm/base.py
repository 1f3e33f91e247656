"""What a backend must do: carry out one collective for the ranks that this process drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

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


def combine(parts: Sequence[Tensor], reduction: Reduction, destination: Tensor) -> None:
    """Write the combination of equally long parts, in their order, to ``destination``; rounds once."""
    first, *rest = parts
    if not rest:
        destination.copy_(first)
        return
    # By the destination, not by the parts: a wider wire must not change the sum.
    wide = accumulation_dtype(destination.dtype)
    match reduction:
        case Reduction.SUM:
            total = torch.add(first.to(wide), rest[0].to(wide))
            for part in rest[1:]:
                total.add_(part)
        case Reduction.MAX:
            total = torch.maximum(first.to(wide), rest[0].to(wide))
            for part in rest[1:]:
                torch.maximum(total, part.to(wide), out=total)
        case _:
            assert_never(reduction)
    destination.copy_(total)
