"""Strided views that count from where their tensor begins, in the place of torch's, which count from its storage.

``torch.as_strided`` takes its offset from the beginning of the storage that a tensor is part of. While a model is
traced that is the tensor itself; when its program runs it is the block of memory in which all temporary buffers stand.
Offsets and strides are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def look(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """The elements of ``x``'s memory in this shape, from ``offset`` elements after its first one on."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


def scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """A copy of ``x`` in which ``look`` with the same arguments shows ``source``.

    What ``source`` puts between the elements of ``x``, or beyond them, is not seen.
    """
    first = min(offset, 0)
    last = max(_span(x.shape, x.stride()), offset + _span(size, stride))
    memory = x.new_empty(last - first)
    result = memory.as_strided(x.shape, x.stride(), -first)
    result.copy_(x)
    memory.as_strided(size, stride, offset - first).copy_(source)
    return result


def look_by_index(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """The elements that ``look`` sees, for a compiler that lays tensors out as it likes; no view.

    ``x`` holds each element of its memory once.
    """
    return _in_memory_order(x)[_positions(size, stride, offset, x.device)]


def scatter_by_index(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """What ``scatter`` makes, for a compiler that lays tensors out as it likes; ``x`` as in ``look_by_index``."""
    positions = _positions(size, stride, offset, x.device).reshape(-1)
    changed = _in_memory_order(x).index_put((positions,), source.reshape(-1))
    order = _memory_order(x)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return changed.view([x.shape[d] for d in order]).permute(back)


def _in_memory_order(x: Tensor) -> Tensor:
    return x.permute(_memory_order(x)).reshape(-1)


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions, those of large strides first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], -x.shape[d]))


def _positions(
    size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device
) -> Tensor:
    """Of each element of a view where it lies in memory, i64 of its shape."""
    found = torch.full((), offset, dtype=torch.int64, device=device)
    for extent, step in zip(size, stride, strict=True):
        found = found.unsqueeze(-1) + torch.arange(extent, device=device) * step
    return found


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a view, both included."""
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


_WHERE = "SymInt[] size, SymInt[] stride, SymInt offset"
torch.library.define("zeroir::strided", f"(Tensor(a) x, {_WHERE}) -> Tensor(a)")
torch.library.define("zeroir::strided_scatter", f"(Tensor x, Tensor source, {_WHERE}) -> Tensor")
# These kernels serve tensors without data, too.
torch.library.impl("zeroir::strided", "CompositeExplicitAutograd", look)
torch.library.impl("zeroir::strided_scatter", "CompositeExplicitAutograd", scatter)

strided: torch._ops.OpOverload = torch.ops.zeroir.strided.default
strided_scatter: torch._ops.OpOverload = torch.ops.zeroir.strided_scatter.default
