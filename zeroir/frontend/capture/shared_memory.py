"""Tensors of a model that are different objects with the same memory, such as ``nn.Parameter(w.data[:8])``.

A program stores each parameter and buffer separately, so a change of one would not change the other. Two with the same
elements in the same order become one, like tied parameters; others are rejected where that would matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend._torch_hooks import gradient_hooks
from zeroir.frontend._torch_private import storage_address
from zeroir.frontend.capture.captured_graph import CapturedGraph, InputKind

NamePair = tuple[str, str]


def tie_equal_tensors(model: nn.Module) -> list[NamePair]:
    """Merge parameters with the same memory, and buffers with the same memory; return the pairs of names.

    Parameters with hooks are not merged, because a hook sees the gradient of one name.
    """
    parameters: dict[_Place, tuple[str, nn.Parameter]] = {}
    buffers: dict[_Place, tuple[str, Tensor]] = {}
    tied: list[NamePair] = []
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if parameter is None or not parameter.numel() or gradient_hooks(parameter):
                continue
            home, first = parameters.setdefault(_place(parameter), (name, parameter))
            if first is not parameter:
                module._parameters[attribute] = first
                tied.append((home, name))
        for attribute, buffer in module._buffers.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if buffer is None or not buffer.numel():
                continue
            home, kept = buffers.setdefault(_place(buffer), (name, buffer))
            if kept is not buffer:
                module._buffers[attribute] = kept
    return tied


def note_on_ties(tied: Sequence[NamePair]) -> str | None:
    """Return a sentence on merged parameters; None if there are none."""
    if not tied:
        return None
    first, second = tied[0]
    more = f" (and {len(tied) - 1} more)" if len(tied) > 1 else ""
    return (
        f"The parameters {first} and {second}{more} are different objects in the same memory: the program trains them "
        "as one tied parameter, with one optimizer state."
    )


_Place = tuple[object, ...]
"""The elements of a tensor in memory, their order, and whether they are trained."""


def _place(tensor: Tensor) -> _Place:
    place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    return (storage_address(tensor), *place, tensor.requires_grad)


def overlapping_tensors(model: nn.Module) -> list[NamePair]:
    """Return the names of buffers that share elements with a parameter or another buffer, parameters first.

    Raises:
        UserError: if two parameters share elements.
    """
    parameters = list(model.named_parameters())
    for first, second in _overlaps(parameters):
        raise UserError(
            f"The parameters {first} and {second} of the model share memory, which a program does not: give both "
            "names to one nn.Parameter, or compute one from the other in forward."
        )
    return _overlaps([*parameters, *model.named_buffers()])


def require_apart(joint: CapturedGraph, overlapping: Sequence[NamePair]) -> None:
    """Raise a UserError if one of two tensors that share memory changes in a step and the other one is used."""
    changing = {name for name, _ in (*joint.gradients, *joint.mutations)}
    read = {value for node in joint.nodes for value in node.refs()}
    read |= {joint.loss, *(value for _, value in joint.mutations)}
    used = changing | {
        item.name
        for item in joint.inputs
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER) and item.value in read
    }
    for pair in overlapping:
        if changing.intersection(pair) and used.issuperset(pair):
            raise UserError(
                f"{pair[0]} and {pair[1]} of the model share memory, and training changes "
                f"{pair[0] if pair[0] in changing else pair[1]}, but a program stores them separately: compute "
                "one from the other in forward, or clone it."
            )


def _overlaps(tensors: Sequence[tuple[str, Tensor]]) -> list[NamePair]:
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    nonempty = [(name, tensor) for name, tensor in tensors if tensor.numel()]
    # This list keeps the storage objects alive, so that no two of them share an id.
    storages = [tensor.untyped_storage() for _, tensor in nonempty]
    for storage, item in zip(storages, nonempty, strict=True):
        by_storage.setdefault(id(storage), []).append(item)
    return [
        (name_a, name_b)
        for group in by_storage.values()
        for (name_a, a), (name_b, b) in combinations(group, 2)
        if _share_elements(a, b)
    ]


def _share_elements(a: Tensor, b: Tensor) -> bool:
    starts, stops = zip(_span_bytes(a), _span_bytes(b), strict=True)
    if max(starts) >= min(stops):
        return False
    if a.dtype != b.dtype:
        return True
    # Ranges may overlap without a shared element, such as those of two columns of a matrix.
    marks = torch.zeros(max(stops) // a.itemsize, dtype=torch.bool, device="cpu")
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _span_bytes(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((int(size) - 1) * int(step) for size, step in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
