"""The poison that marks undefined elements, the dtype in which contributions are added, and ranges of elements."""

from __future__ import annotations

import torch
from torch import Tensor


def poison(tensor: Tensor) -> None:
    """Overwrite every element with a value that no program may use: NaN, the largest integer, or True."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which contributions are added: FP32 for narrower floating dtypes, otherwise ``dtype``."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_narrow else dtype


def common(a: range, b: range) -> range:
    """Return the intersection of two ranges of elements."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
