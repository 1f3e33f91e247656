"""Strided views whose offset counts from the beginning of their tensor; torch's counts from that of its storage.

The offset of ``torch.as_strided`` counts from the beginning of the storage that contains a tensor. While a model is
traced, the storage begins with the tensor; when its program runs, the storage is the memory of all temporary buffers.
Offsets and strides are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def strided_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Return the elements of ``x``'s memory in this shape, beginning ``offset`` elements after the first of ``x``."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


def scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Return a copy of ``x`` in which ``strided_view`` with the same arguments equals ``source``.

    Elements of ``source`` between the elements of ``x`` or beyond them are lost.
    """
    first = min(offset, 0)
    last = max(_span(x.shape, x.stride()), offset + _span(size, stride))
    memory = x.new_empty(last - first)
    result = memory.as_strided(x.shape, x.stride(), -first)
    result.copy_(x)
    memory.as_strided(size, stride, offset - first).copy_(source)
    return result


def strided_view_by_index(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Return a copy of ``strided_view``, for a compiler that chooses the layout of tensors itself.

    ``x`` has each element of its memory once.
    """
    return _in_memory_order(x)[_positions(size, stride, offset, x.device)]


def scatter_by_index(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Return the result of ``scatter``, for a compiler that chooses the layout of tensors itself.

    ``x`` has each element of its memory once.
    """
    positions = _positions(size, stride, offset, x.device).reshape(-1)
    changed = _in_memory_order(x).index_put((positions,), source.reshape(-1))
    order = _memory_order(x)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return changed.view([x.shape[d] for d in order]).permute(back)


def _in_memory_order(x: Tensor) -> Tensor:
    return x.permute(_memory_order(x)).reshape(-1)


def _memory_order(x: Tensor) -> list[int]:
    """Return the dimensions, those with large strides first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], -x.shape[d]))


def _positions(
    size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device
) -> Tensor:
    """Return the position in memory of each element of a view, i64 of the view's shape."""
    positions = torch.full((), offset, dtype=torch.int64, device=device)
    for extent, step in zip(size, stride, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(extent, device=device) * step
    return positions


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements in memory from the first to the last of a view, both included."""
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


_VIEW_ARGUMENTS = "SymInt[] size, SymInt[] stride, SymInt offset"
torch.library.define("zeroir::strided", f"(Tensor(a) x, {_VIEW_ARGUMENTS}) -> Tensor(a)")
torch.library.define(
    "zeroir::strided_scatter", f"(Tensor x, Tensor source, {_VIEW_ARGUMENTS}) -> Tensor"
)
# These kernels also run on fake tensors.
torch.library.impl("zeroir::strided", "CompositeExplicitAutograd", strided_view)
torch.library.impl("zeroir::strided_scatter", "CompositeExplicitAutograd", scatter)

strided: torch._ops.OpOverload = torch.ops.zeroir.strided.default
strided_scatter: torch._ops.OpOverload = torch.ops.zeroir.strided_scatter.default
