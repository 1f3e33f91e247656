"""One optimizer step with states of 8 bits: chunk by chunk, they are widened to FP32, updated, and rounded again.

The update is that of FP32 states, by the same kernels. At most ``Scratch`` and the FP32 states of one chunk exist at a
time; the kernels are many small ones, so that a step takes several times as long as with FP32 states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroir.ir.eight_bit_states import blocks_numel
from zeroir.ir.ops import Algorithm
from zeroir.runtime.chunked_update import GroupPieces
from zeroir.runtime.eight_bit_states import Scratch, code_map, narrow, widen
from zeroir.workspace.op_scratch import CODED_CHUNK_NUMEL, CODED_CPU_CHUNK_NUMEL


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedState:
    """A state of a region on one rank: u8 codes, the f32 scales of their blocks, and whether it can be negative."""

    codes: Tensor
    absmax: Tensor
    signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedUpdate:
    """The step of a region on one rank; ``param`` and ``grad`` are f32, of one numel with each state."""

    algorithm: Algorithm
    param: Tensor
    grad: Tensor
    states: Sequence[CodedState]
    groups: Sequence[GroupPieces]
    skip: Tensor | None

    def prepare(self) -> None:
        """Make the tables that the step reads, which a captured graph cannot make."""
        for state in self.states:
            code_map(self.param.device, signed=state.signed)

    def __call__(self) -> None:
        """Carry out the step."""
        numel = self.param.numel()
        most = CODED_CPU_CHUNK_NUMEL if self.param.device.type == "cpu" else CODED_CHUNK_NUMEL
        chunk_numel = min(numel, most)
        scratch = Scratch(chunk_numel, self.param.device)
        widened = self.param.new_empty(len(self.states), chunk_numel)
        is_skipped = None if self.skip is None else self.skip > 0
        for start in range(0, numel, chunk_numel):
            chunk = slice(start, min(start + chunk_numel, numel))
            values = list(widened[:, : chunk.stop - chunk.start].unbind())
            self._step(chunk, values, scratch, is_skipped)

    def _step(
        self, chunk: slice, values: Sequence[Tensor], scratch: Scratch, is_skipped: Tensor | None
    ) -> None:
        blocks = slice(blocks_numel(chunk.start), blocks_numel(chunk.stop))
        for state, wide in zip(self.states, values, strict=True):
            codes, absmax = state.codes[chunk], state.absmax[blocks]
            widen(codes, absmax, wide, scratch, signed=state.signed)
        for group in self.groups:
            group.update(self.algorithm, chunk, self.param[chunk], self.grad[chunk], values)
        for state, wide in zip(self.states, values, strict=True):
            codes, absmax = state.codes[chunk], state.absmax[blocks]
            narrow(wide, codes, absmax, scratch, signed=state.signed, is_skipped=is_skipped)
