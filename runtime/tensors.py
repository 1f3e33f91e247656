"""The dtypes of the IR in torch, and the poison that marks undefined elements."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.dtypes import DType

TORCH_DTYPE: Final[Mapping[DType, torch.dtype]] = MappingProxyType(
    {
        DType.F64: torch.float64,
        DType.F32: torch.float32,
        DType.F16: torch.float16,
        DType.BF16: torch.bfloat16,
        DType.I64: torch.int64,
        DType.I32: torch.int32,
        DType.I16: torch.int16,
        DType.I8: torch.int8,
        DType.U8: torch.uint8,
        DType.BOOL: torch.bool,
    }
)
IR_DTYPE: Final[Mapping[torch.dtype, DType]] = MappingProxyType(
    {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}
)


def poison(tensor: Tensor) -> None:
    """Overwrite every element with a value that no program may use: NaN, the largest integer, or True."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions are added: FP32 for narrower floating dtypes, otherwise the dtype itself."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_narrow else dtype


def common(a: range, b: range) -> range:
    """The intersection of two ranges of elements."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
