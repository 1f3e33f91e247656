"""Optimizer steps chunk by chunk, which do more than the fused kernel to each chunk while it is in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from zeroir.ir.ops import Algorithm
from zeroir.runtime.optimizers.catalogue import element_update
from zeroir.runtime.optimizers.operands import Operands
from zeroir.workspace.op_scratch import SPECULATED_CHUNK_NUMEL


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPieces:
    """The parts of a region that belong to a group, and its operands, with empty params, grads and states."""

    pieces: Sequence[slice]
    operands: Operands

    def update(
        self,
        algorithm: Algorithm,
        chunk: slice,
        param: Tensor,
        grad: Tensor,
        states: Sequence[Tensor],
    ) -> None:
        """Update the group's elements in a chunk of the region; the tensors have the elements of the chunk."""
        pieces = list(_within(self.pieces, chunk))
        if not pieces:
            return
        operands = replace(
            self.operands,
            params=[param[piece] for piece in pieces],
            grads=[grad[piece] for piece in pieces],
            states=[[state[piece] for piece in pieces] for state in states],
        )
        element_update(algorithm).update(operands)


def _within(pieces: Sequence[slice], chunk: slice) -> Iterator[slice]:
    """Yield the parts of pieces within a chunk, counted from its first element."""
    for piece in pieces:
        start, stop = max(piece.start, chunk.start), min(piece.stop, chunk.stop)
        if start < stop:
            yield slice(start - chunk.start, stop - chunk.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeUpdate:
    """The ops ``speculative_step`` and ``commit_step`` of a region on one rank.

    ``param``, ``states`` and their copies ``kept``, in this order, are f32 in host memory; ``grad`` has any floating
    dtype and does not change, and ``rounded`` is a copy of ``param`` in its own dtype.
    """

    algorithm: Algorithm
    param: Tensor
    grad: Tensor
    states: Sequence[Tensor]
    kept: Sequence[Tensor]
    groups: Sequence[GroupPieces]
    rounded: Tensor | None

    def speculate(self) -> None:
        """Copy the elements to ``kept``, and update them."""
        for chunk, scratch in self._chunks():
            for tensor, kept in zip((self.param, *self.states), self.kept, strict=True):
                kept[chunk].copy_(tensor[chunk])
            self._step(chunk, scratch)

    def commit(self, redo: Tensor) -> None:
        """Keep the updated elements, or with a ``redo`` of 1 update the old ones again."""
        if not redo.item():
            return
        for chunk, scratch in self._chunks():
            for tensor, kept in zip((self.param, *self.states), self.kept, strict=True):
                tensor[chunk].copy_(kept[chunk])
            self._step(chunk, scratch)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk of the region, with scratch memory for its gradient."""
        numel = self.param.numel()
        scratch = self.param.new_empty(min(numel, SPECULATED_CHUNK_NUMEL))
        for start in range(0, numel, SPECULATED_CHUNK_NUMEL):
            chunk = slice(start, min(start + SPECULATED_CHUNK_NUMEL, numel))
            yield chunk, scratch[: chunk.stop - chunk.start]

    def _step(self, chunk: slice, scratch: Tensor) -> None:
        # The kernels store the divided gradient in their operand.
        scratch.copy_(self.grad[chunk])
        states = [state[chunk] for state in self.states]
        for group in self.groups:
            group.update(self.algorithm, chunk, self.param[chunk], scratch, states)
        if self.rounded is not None:
            self.rounded[chunk].copy_(self.param[chunk])
