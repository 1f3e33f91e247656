"""The element types of the IR and of torch."""

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
        DType.F8_E4M3: torch.float8_e4m3fn,
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

LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


def widened(value: object) -> object:
    """Convert a 16-bit tensor to FP32; return everything else unchanged."""
    is_low = isinstance(value, Tensor) and value.dtype in LOW_PRECISION
    return value.float() if is_low and isinstance(value, Tensor) else value
