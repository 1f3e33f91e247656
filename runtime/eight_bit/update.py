"""One optimizer step with states of 8 bits: each chunk is widened to FP32, updated, and rounded again.

The update is the one for FP32 states, by the same kernels. On a CPU compiled code widens and rounds, if there is any,
and only one chunk of FP32 states exists at a time. Elsewhere torch's kernels do, with ``Scratch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel
from zeroir.ir.ops import Algorithm
from zeroir.runtime.eight_bit.compiled_rounding import CompiledRounding
from zeroir.runtime.eight_bit.rounding import Scratch, code_map, narrow, widen
from zeroir.runtime.optimizers.chunked_update import GroupPieces
from zeroir.workspace.op_scratch import (
    CODED_CHUNK_NUMEL,
    CODED_CPU_CHUNK_NUMEL,
    CODED_THREAD_CHUNK_NUMEL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedState:
    """A state of a region on one rank: u8 codes, the f32 scales of their blocks, and whether values can be negative."""

    codes: Tensor
    absmax: Tensor
    signed: bool


class _RoundedState(Protocol):
    """Converts blocks of a state to FP32 values of a chunk, and back."""

    def widen(self, blocks: slice, out: Tensor) -> None: ...

    def narrow(self, blocks: slice, values: Tensor, is_skipped: Tensor | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchState:
    """A state that torch's operators convert; ``scratch`` has room for the elements of a chunk."""

    state: CodedState
    scratch: Scratch

    def widen(self, blocks: slice, out: Tensor) -> None:
        codes, absmax = self._own(blocks)
        widen(codes, absmax, out, self.scratch, signed=self.state.signed)

    def narrow(self, blocks: slice, values: Tensor, is_skipped: Tensor | None) -> None:
        codes, absmax = self._own(blocks)
        signed = self.state.signed
        narrow(values, codes, absmax, self.scratch, signed=signed, is_skipped=is_skipped)

    def _own(self, blocks: slice) -> tuple[Tensor, Tensor]:
        elements = slice(blocks.start * BLOCK_NUMEL, blocks.stop * BLOCK_NUMEL)
        return self.state.codes[elements], self.state.absmax[blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedUpdate:
    """The step of a region on one rank; ``param`` and ``grad`` are f32, with the same numel as each state.

    ``compiled`` rounds the states of a region on the CPU; where it is None torch's operators do, with equal bits.
    """

    algorithm: Algorithm
    param: Tensor
    grad: Tensor
    states: Sequence[CodedState]
    groups: Sequence[GroupPieces]
    skip: Tensor | None
    compiled: CompiledRounding | None = None

    def prepare(self) -> None:
        """Create the tables that the step reads, because a captured graph cannot create them."""
        for state in self.states:
            code_map(self.param.device, signed=state.signed)

    def __call__(self) -> None:
        """Run the step."""
        numel = self.param.numel()
        chunk_numel = min(numel, self._most_numel())
        widened = self.param.new_empty(len(self.states), chunk_numel)
        is_skipped = None if self.skip is None else self.skip > 0
        states = self._states(chunk_numel)
        for start in range(0, numel, chunk_numel):
            chunk = slice(start, min(start + chunk_numel, numel))
            blocks = slice(blocks_numel(chunk.start), blocks_numel(chunk.stop))
            values = list(widened[:, : chunk.stop - chunk.start].unbind())
            for state, wide in zip(states, values, strict=True):
                state.widen(blocks, wide)
            self._update(chunk, values)
            for state, wide in zip(states, values, strict=True):
                state.narrow(blocks, wide, is_skipped)

    def _most_numel(self) -> int:
        """Return the most elements of a chunk; the results do not depend on it."""
        if self.param.device.type != "cpu":
            return CODED_CHUNK_NUMEL
        if self.compiled is None:
            return CODED_CPU_CHUNK_NUMEL
        return min(torch.get_num_threads() * CODED_THREAD_CHUNK_NUMEL, CODED_CHUNK_NUMEL)

    def _states(self, chunk_numel: int) -> Sequence[_RoundedState]:
        """Return the objects that widen and narrow the blocks of a chunk, one for each state."""
        if self.compiled is not None:
            return [
                self.compiled.state(state.codes, state.absmax, signed=state.signed)
                for state in self.states
            ]
        scratch = Scratch(chunk_numel, self.param.device)
        return [_TorchState(state=state, scratch=scratch) for state in self.states]

    def _update(self, chunk: slice, values: Sequence[Tensor]) -> None:
        for group in self.groups:
            group.update(self.algorithm, chunk, self.param[chunk], self.grad[chunk], values)
