"""The shapes of a batch as a user gives them in Python: as ``torch.export`` takes them, or as a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeGuard

import torch
from torch.export import Dim as ExportDim
from torch.export import ShapesCollection

from zeroir.config.shapes import BatchShapes, parse_shapes, shapes_text
from zeroir.errors import BatchError, UserError
from zeroir.ir.limits import MOST_COUNT
from zeroir.ir.sizes import Dim
from zeroir.torch_ops.batches import Batch, flatten

_EXAMPLE: Final = "torch.export.Dim('length', max=8192)"


def given_shapes(given: object, batch: Batch, name: str = "the batch") -> BatchShapes:
    """Return the shapes of a batch that a user gives: a text, a ``ShapesCollection``, or the structure of the batch.

    A list of further example batches gives a dim to each size that differs among them and the batch; sizes that are
    equal in all of them share one, from the smallest to the largest of its values there.

    In the structure a tuple or list of sizes, a dict from axes to sizes, or None, stands in the place of each tensor.
    A size is a ``torch.export.Dim`` with a ``max``, a multiple of one plus a number, a number, or None for that of the
    batch.

    Raises:
        UserError: where it is none of these, does not fit the batch, or a dim has no largest value.
    """
    if isinstance(given, str):
        return parse_shapes(given)
    tensors = flatten(batch, name).tensors
    if _are_batches(given):
        return _differing_sizes([tensors, *(flatten(each).tensors for each in given)])
    if isinstance(given, ShapesCollection):
        specs: dict[str, object] = {path: given[tensor] or None for path, tensor in tensors.items()}
    elif isinstance(batch, torch.Tensor):
        specs = {"0": given}
    else:
        specs = dict(_specs(given, "", tensors))
    dims: dict[str, Dim] = {}
    shapes: dict[str, tuple[int | None, ...]] = {}
    for path, spec in specs.items():
        if spec is None:
            continue
        if path not in tensors:
            raise UserError(
                f"The shapes name {path}, which {name} does not have; its tensors are {', '.join(tensors)}."
            )
        shapes[path] = _shape(spec, tensors[path].dim(), path, dims)
    # The text has the rules of names and ranges.
    return parse_shapes(shapes_text(shapes)) if shapes else {}


def _are_batches(given: object) -> TypeGuard[list[Batch]]:
    """Return whether a list of batches is given, rather than sizes in the places of tensors."""
    return isinstance(given, list) and bool(given) and all(_has_tensors(each) for each in given)


def _has_tensors(value: object) -> bool:
    try:
        return bool(flatten(value).tensors)
    except BatchError:
        return False


def _differing_sizes(examples: Sequence[Mapping[str, torch.Tensor]]) -> BatchShapes:
    """Give each size that differs among the examples a dim, which sizes with the same values share."""
    first = examples[0]
    for other in examples[1:]:
        if {path: x.dim() for path, x in other.items()} != {
            path: x.dim() for path, x in first.items()
        }:
            raise UserError(
                "The shapes have a batch with other tensors, or other numbers of dimensions, than the example batch."
            )
    dims: dict[tuple[int, ...], Dim] = {}
    shapes: dict[str, tuple[int | None, ...]] = {}
    for path, tensor in first.items():
        sizes: list[int | None] = []
        for axis in range(tensor.dim()):
            values = tuple(example[path].shape[axis] for example in examples)
            if len(set(values)) == 1:
                sizes.append(None)
                continue
            name = re.sub(r"\W", "_", f"dim_{path}_{axis}", flags=re.ASCII)
            dim = Dim(name=name, minimum=min(values), maximum=max(values))
            sizes.append(dims.setdefault(values, dim).size)
        if any(size is not None for size in sizes):
            shapes[path] = tuple(sizes)
    if not shapes:
        raise UserError(
            "The shapes are batches of the same sizes as the example batch: give some with other sizes."
        )
    return shapes


def _specs(
    given: object, path: str, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, object]]:
    """Return what stands in the place of each tensor, by its path."""
    if path in tensors or given is None:
        return [(path, given)] if path else []
    match given:
        case Mapping():
            items = [(str(key), item) for key, item in given.items()]
        case list() | tuple():
            items = [(str(index), item) for index, item in enumerate(given)]
        case _:
            raise UserError(
                f"The shapes have {given!r:.60} at {path or 'the top'}, but should have the structure of the batch, "
                f"with sizes such as {_EXAMPLE} in the places of tensors."
            )
    return [
        pair
        for key, item in items
        for pair in _specs(item, f"{path}.{key}" if path else key, tensors)
    ]


def _shape(spec: object, rank: int, path: str, dims: dict[str, Dim]) -> tuple[int | None, ...]:
    match spec:
        case Mapping():
            by_axis = {
                axis + rank if isinstance(axis, int) and axis < 0 else axis: size
                for axis, size in spec.items()
            }
            unknown = [axis for axis in by_axis if axis not in range(rank)]
            if unknown:
                raise UserError(
                    f"The shapes name the axis {unknown[0]!r} of {path}, which has {rank} dimensions."
                )
            sizes: Sequence[object] = [by_axis.get(axis) for axis in range(rank)]
        case list() | tuple():
            sizes = spec
        case _:
            raise UserError(
                f"The shapes have {spec!r:.60} for {path}, but should have a tuple of its sizes, or a dict from axes "
                "to sizes."
            )
    return tuple(_size(size, f"axis {axis} of {path}", dims) for axis, size in enumerate(sizes))


def _size(size: object, where: str, dims: dict[str, Dim]) -> int | None:
    if size is None or size is ExportDim.STATIC:
        return None
    if isinstance(size, int):
        return size
    root, factor, number = size, 1, 0
    if hasattr(size, "root") and hasattr(size, "fn"):  # a multiple of a dim, or a sum
        root = size.root
        first, second = size.fn(1), size.fn(2)
        factor, number = second - first, 2 * first - second
        if factor < 1:
            raise UserError(
                f"The shapes have {size} at {where}, but a size grows with its dim: give a dim, or a multiple of one "
                "plus a number."
            )
    if not isinstance(root, ExportDim):
        raise UserError(
            f"The shapes have {size!r:.60} at {where}, but should have a dim with a name and a largest value, such as "
            f"{_EXAMPLE}."
        )
    name = root.__name__
    if not isinstance(root.max, int) or root.max > MOST_COUNT:
        raise UserError(
            f"The dim {name} at {where} has no largest value, for which memory is planned: give "
            f"torch.export.Dim({name!r}, max=8192)."
        )
    dim = Dim(name=name, minimum=max(int(root.min), 1), maximum=root.max)
    if dims.setdefault(name, dim) != dim:
        raise UserError(f"The shapes give two ranges to the dim {name}.")
    return dim.size * factor + number
