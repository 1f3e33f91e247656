"""Batches of drawn sizes, for a program with dims: the smallest and the largest first, then random ones.

Their values are those of the example batch, which is repeated along a dim and cut off, from a random place on: so
indices stay valid, numbers have the example's distribution, and tensors that were equal still are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zeroir.config.shapes import BatchShapes
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.torch_ops.batches import Batch, flatten, with_tensors

Sizes = Mapping[str, int]
"""The values of dims by name."""


def drawn_sizes(program: Program, rank: int, seed: int) -> Iterator[Sizes]:
    """Yield the sizes of a rank's batches.

    All ranks together begin with the smallest and the largest sizes, then mix both.
    """
    world_size = program.mesh.world_size
    generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
    number = rank
    while True:
        sizes: dict[str, int] = {}
        for index, dim in enumerate(program.dims):
            ends = (dim.minimum, dim.maximum)
            drawn = int(torch.randint(dim.minimum, dim.maximum + 1, (), generator=generator))
            match number:
                case 0 | 1:
                    sizes[dim.name] = ends[number]
                case 2 | 3 if len(program.dims) > 1:
                    sizes[dim.name] = ends[(index + number) % 2]
                case _:
                    sizes[dim.name] = drawn
        yield sizes
        number += world_size


def batch_of_sizes(
    program: Program, example: Batch, sizes: Sizes, generator: torch.Generator
) -> Batch:
    """Return the example batch with other sizes of a program, as ``with_sizes`` does."""
    shapes = {binding.path: binding.shape for binding in program.inputs}
    return with_sizes(example, shapes, sizes, generator)


def with_sizes(
    example: Batch, shapes: BatchShapes, sizes: Sizes, generator: torch.Generator
) -> Batch:
    """Return the example batch with other sizes, where its tensors have these shapes by path.

    Raises:
        UserError: if the example has no element to repeat.
    """
    paths = iter(flatten(example).tensors)
    begins: dict[tuple[Size, int], int] = {}

    def resized(tensor: Tensor) -> Tensor:
        path = next(paths)
        for axis, size in enumerate(shapes.get(path, ())):
            if not isinstance(size, Size):
                continue
            present = tensor.shape[axis]
            if not present:
                raise UserError(
                    f"No batch of other sizes can be made from the example: its '{path}' has no elements to repeat. "
                    "Give another example, or batches() in the model file."
                )
            if (size, present) not in begins:
                begins[size, present] = int(torch.randint(present, (), generator=generator))
            places = (torch.arange(size.at(sizes)) + begins[size, present]) % present
            tensor = tensor.index_select(axis, places.to(tensor.device))
        return tensor

    return with_tensors(example, resized)
