"""The tensors of one update on one rank, of elements or of whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroir.runtime.optimizers.arithmetic import Number, chunks, overwrite
from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Operands of the update of a group's elements in a region.

    ``params``, ``grads`` and each of ``states`` are pieces, flat f32; those at one index have the same length.
    ``step``, ``divisor`` and ``skip`` are f32[1] and ``lr`` f64[1] on their device; ``hyper`` is f64 on the host.
    ``padding`` are the parts of the flat that belong to no parameter.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    step: Tensor
    lr: Tensor
    hyper: Tensor
    divisor: Tensor
    skip: Tensor | None
    padding: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """A tensor of the state that an optimizer keeps of a whole parameter.

    ``whole`` is the entire tensor in its shape, from before the step unless this rank keeps all of it; ``own`` is the
    flat part that this rank keeps, from the element ``start`` on. It may be empty.
    """

    whole: Tensor
    own: Tensor
    start: int

    def move(self, new: Tensor, is_skipped: Tensor | None = None) -> None:
        """Set this rank's part from ``new``, which has the shape of the whole, unless ``is_skipped``."""
        part = new.flatten()[self.start : self.start + self.own.numel()]
        overwrite(self.own, part, is_skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameter:
    """Tensors of one parameter on one rank.

    ``direction`` has the parameter's shape. ``param`` is the flat part that this rank updates, from the parameter's
    element ``start`` on; it may be empty. ``whole`` is the entire parameter, before the step, where the optimizer reads
    it, and ``kept`` is the optimizer's own state of the parameter.
    """

    direction: Tensor
    param: Tensor
    start: int
    whole: Tensor | None = None
    kept: Sequence[KeptPart] = ()

    def apply(
        self, update: Tensor, factor: Number, rate: Number, is_skipped: Tensor | None
    ) -> None:
        """Set this rank's part to parameter × factor − update × rate, chunk by chunk.

        The result does not depend on the sharding: torch's kernels for additions and products round each element in the
        same way, wherever a piece starts.
        """
        numel = self.param.numel()
        part = update.flatten()[self.start : self.start + numel]
        scratch = self.param.new_empty(2, min(numel, STEPPED_CHUNK_NUMEL))
        for param, own in chunks((self.param, part)):
            new, wide = scratch[:, : param.numel()]
            torch.mul(param, factor, out=new)
            wide.copy_(own)
            if isinstance(rate, Tensor):
                new.sub_(wide.mul_(rate))
            else:
                new.add_(wide, alpha=-rate)
            overwrite(param, new, is_skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOperands:
    """Operands of the step of a group's parameters; the scalars are those of ``Operands``."""

    parameters: Sequence[WholeParameter]
    step: Tensor
    lr: Tensor
    hyper: Tensor
    skip: Tensor | None
