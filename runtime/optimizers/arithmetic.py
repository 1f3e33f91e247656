"""Arithmetic shared by the updates of several optimizers.

On a CPU, numbers that torch.optim reads from tensors are read in the same way. On a CUDA device they stay there, so
that the host does not wait; then a step may differ from torch's in the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL

Number = float | Tensor
"""A number on the host, or one element on a CUDA device."""


def chunks(pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of several flat tensors of the same length, chunk by chunk."""
    for start in range(0, pieces[0].numel(), STEPPED_CHUNK_NUMEL):
        yield tuple(piece[start : start + STEPPED_CHUNK_NUMEL] for piece in pieces)


def skipped(skip: Tensor | None) -> Tensor | None:
    """Return whether the update is skipped, as a tensor on the device; None where it never is."""
    return None if skip is None else skip.reshape(()) > 0


def overwrite(old: Tensor, new: Tensor, is_skipped: Tensor | None) -> None:
    """Replace the elements of ``old`` by those of ``new``, unless the update is skipped."""
    if is_skipped is None:
        old.copy_(new)
    else:
        torch.where(is_skipped, old, new, out=old)


def learning_rate(lr: Tensor) -> Tensor:
    """Return the learning rate as torch's kernels read it: any float on the host, FP32 on a CUDA device."""
    return lr if lr.device.type == "cpu" else lr.to(torch.float32)


def number(value: Tensor) -> Number:
    """Return one element: on a CPU as a Python float, with which torch.optim computes."""
    return float(value) if value.device.type == "cpu" else value.to(torch.float64).reshape(())


def norm(values: Tensor) -> Number:
    """Return the L2 norm."""
    return number(torch.linalg.vector_norm(values))


def largest(value: Number, bound: float) -> Number:
    """Return the larger of two numbers."""
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def least(value: Number, bound: Number) -> Number:
    """Return the smaller of two numbers, both on the host or both on the device."""
    if isinstance(value, Tensor) and isinstance(bound, Tensor):
        return torch.minimum(value, bound)
    assert not isinstance(value, Tensor)
    assert not isinstance(bound, Tensor)
    return min(value, bound)
