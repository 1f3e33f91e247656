"""Batches of given sizes, made from batches of others: cut where they are larger, repeated where they are smaller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.runtime.data.training_data import BatchFunction
from zeroir.torch_ops.batches import Batch, flatten, with_tensors


def sized(program: Program, values: Mapping[str, int], function: BatchFunction) -> BatchFunction:
    """Return a function whose batches are those of another one where each dim has this value.

    Their elements are those of the given batches, so that indices stay valid.
    """

    def batches(rank: int, world_size: int, seed: int) -> Iterable[Batch]:
        return _sized(program, values, function(rank, world_size, seed))

    return batches


def _sized(
    program: Program, values: Mapping[str, int], batches: Iterable[Batch]
) -> Iterator[Batch]:
    shapes = {binding.path: binding.shape for binding in program.inputs}
    for batch in batches:
        paths = iter(flatten(batch).tensors)

        def resized(tensor: Tensor, paths: Iterator[str] = paths) -> Tensor:
            sizes = shapes.get(next(paths), ())
            if len(sizes) != tensor.dim():
                return tensor  # the engine says so
            for axis, size in enumerate(sizes):
                if isinstance(size, Size) and tensor.shape[axis]:
                    places = torch.arange(size.at(values)) % tensor.shape[axis]
                    tensor = tensor.index_select(axis, places.to(tensor.device))
            return tensor

        yield with_tensors(batch, resized)
