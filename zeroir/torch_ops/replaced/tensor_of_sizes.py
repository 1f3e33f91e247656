"""Tensors of sizes that depend on dims, as in ``torch.tensor(x.shape[1])``, of which torch makes plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import SymFloat, SymInt, Tensor

_SIZES = (SymInt, SymFloat)


def are_sizes(data: object) -> bool:
    """Return whether data of a tensor is a size that depends on dims, or a sequence with one in it."""
    if isinstance(data, list | tuple):
        return any(map(are_sizes, data))
    return isinstance(data, _SIZES)


def tensor_of(
    data: object, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> Tensor:
    """Compute ``torch.tensor`` of such data."""
    if dtype is None:
        is_real = any(isinstance(number, float | SymFloat) for number in _numbers(data))
        dtype = torch.get_default_dtype() if is_real else torch.int64
    if isinstance(data, Sequence):
        return torch.stack([tensor_of(item, dtype, device) for item in data])
    assert isinstance(data, int | float | SymInt | SymFloat)
    # torch declares no number that depends on dims.
    return torch.full((), cast("float", data), dtype=dtype, device=device)


def _numbers(data: object) -> list[object]:
    if isinstance(data, list | tuple):
        return [number for item in data for number in _numbers(item)]
    return [data]
