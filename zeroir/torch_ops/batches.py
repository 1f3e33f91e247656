"""Batches: the tensors that they may hold."""

from __future__ import annotations

import torch
from torch import Tensor

Batch = object
"""One rank's micro-batch: tensors, nested in tuples, lists and dicts, or one tensor."""


def undense_kind(tensor: Tensor) -> str | None:
    """The reason in words why no dense values can be copied from a tensor; None where they can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "on the meta device, where tensors have no values"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    return None
