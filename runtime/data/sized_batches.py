"""Batches of given sizes, made from batches of others: cut where they are larger, repeated where they are smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.torch_ops.batches import flatten, with_tensors

T = TypeVar("T")


def sized(program: Program, values: Mapping[str, int], batch: T) -> T:
    """Return a batch where each dim of the program has this value.

    Its elements are those of the given batch, so that indices stay valid.
    """
    if not program.dims:
        return batch
    shapes = {binding.path: binding.shape for binding in program.inputs}
    paths = iter(flatten(batch).tensors)

    def resized(tensor: Tensor) -> Tensor:
        sizes = shapes.get(next(paths), ())
        if len(sizes) != tensor.dim():
            return tensor  # the engine says so
        for axis, size in enumerate(sizes):
            if isinstance(size, Size) and tensor.shape[axis]:
                places = torch.arange(size.at(values), device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, places)
        return tensor

    return with_tensors(batch, resized)
