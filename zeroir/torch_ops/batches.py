"""Which tensors a batch may hold."""

from __future__ import annotations

import torch
from torch import Tensor


def strange_kind(tensor: Tensor) -> str | None:
    """What a tensor is that no dense values can be copied from, in words; None where they can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "on the meta device, where tensors have no values"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    return None
