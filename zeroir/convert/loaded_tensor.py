"""Checkpoint tensors in memory, for formats that torch writes."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroir.convert.exported import ExportedTensor
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.convert.torch_dtypes import TORCH_DTYPES


def loaded_tensor(stored: StoredTensors, exported: ExportedTensor) -> Tensor:
    """Load a parameter, buffer or state into new memory, in its shape.

    Raises:
        UserError: if a file is damaged.
    """
    tensor = torch.empty(exported.shape, dtype=TORCH_DTYPES[exported.dtype])
    if not exported.size_bytes:
        return tensor
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    position = 0
    for part in exported.parts(stored):
        part_bytes = part.cast("B")
        data[position : position + part_bytes.nbytes] = part_bytes
        position += part_bytes.nbytes
    return tensor
