"""The calls of segments in a step, recorded while eager kernels run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.eager import EagerKernels


@dataclass(frozen=True)
class Call:
    """A segment as a step called it, with what it read, held before and wrote."""

    segment: Segment
    bindings: tuple[Binding | None, ...]
    arguments: list[Tensor]
    before: list[Tensor | None]
    after: list[Tensor | None]


@dataclass
class RecordingKernels:
    """Eager kernels that keep the first call of everything they compile."""

    compiles_dims: ClassVar[bool] = False

    calls: list[Call] = field(default_factory=list)
    inner: EagerKernels = field(default_factory=lambda: EagerKernels(torch.device("cpu")))
    seen: dict[tuple[str, tuple[Binding | None, ...]], Kernel] = field(default_factory=dict)

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        key = (segment.digest(), tuple(bindings))
        kernel, is_recorded = self.inner.compile(segment, bindings), key in self.seen

        def run(arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
            nonlocal is_recorded
            if is_recorded:
                kernel(arguments, destinations)
                return
            is_recorded = True
            read, before = [held(one) for one in arguments], copies(destinations)
            kernel(arguments, destinations)
            after = copies(destinations)
            self.calls.append(Call(segment, tuple(bindings), read, before, after))

        return self.seen.setdefault(key, run)

    def at(self, values: Mapping[str, int]) -> RecordingKernels:
        del values
        return self

    def finish(self) -> None:
        pass


def held(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where an element is at several indices."""
    once = tensor
    for axis, stride in enumerate(tensor.stride()):
        once = once.narrow(axis, 0, min(1, once.shape[axis])) if stride == 0 else once
    copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype).copy_(once)
    return copy.expand(tensor.shape)


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of tensors; those that are one piece of memory have one copy."""
    made: dict[tuple[object, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        return made.setdefault(key, held(tensor)) if tensor.numel() else held(tensor)

    return [None if tensor is None else copy(tensor) for tensor in tensors]
