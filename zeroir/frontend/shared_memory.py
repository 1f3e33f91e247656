"""Tensors of a model that are different objects in the same memory, as ``nn.Parameter(w.data[:8])``.

A program keeps each parameter and buffer by itself, so a change of one would not be seen in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend.joint import InputKind, Joint

Pair = tuple[str, str]


def overlapping_tensors(model: nn.Module) -> list[Pair]:
    """Names of the buffers that share elements with a parameter or another buffer, parameters first.

    Raises:
        UserError: where two parameters share elements.
    """
    parameters = list(model.named_parameters())
    for one, other in _overlaps(parameters):
        raise UserError(
            f"The parameters {one} and {other} of the model share memory, which a program does not: give both names to "
            f"one nn.Parameter, or make the one of the other in forward."
        )
    return _overlaps([*parameters, *model.named_buffers()])


def require_apart(joint: Joint, overlapping: Sequence[Pair]) -> None:
    """UserError where one of two tensors that share memory changes in a step and the other one is used."""
    changing = {name for name, _ in (*joint.gradients, *joint.mutations)}
    read = {value for node in joint.nodes for value in node.refs()}
    read |= {joint.loss, *(value for _, value in joint.mutations)}
    used = changing | {
        each.name
        for each in joint.inputs
        if each.kind in (InputKind.PARAMETER, InputKind.BUFFER) and each.value in read
    }
    for pair in overlapping:
        if changing.intersection(pair) and used.issuperset(pair):
            raise UserError(
                f"{pair[0]} and {pair[1]} of the model share memory, and training changes "
                f"{pair[0] if pair[0] in changing else pair[1]}, which a program would not show in the other: make the "
                "one of the other in forward, or clone it."
            )


def _overlaps(tensors: Sequence[tuple[str, Tensor]]) -> list[Pair]:
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    # Alive until all are seen, so that no two of them share an id.
    storages = [tensor.untyped_storage() for _, tensor in tensors if tensor.numel()]
    for storage, item in zip(storages, (one for one in tensors if one[1].numel()), strict=True):
        by_storage.setdefault(id(storage), []).append(item)
    return [
        (one[0], other[0])
        for group in by_storage.values()
        for one, other in combinations(group, 2)
        if _share_elements(one[1], other[1])
    ]


def _share_elements(one: Tensor, other: Tensor) -> bool:
    starts, stops = zip(_span_bytes(one), _span_bytes(other), strict=True)
    if max(starts) >= min(stops):
        return False
    if one.dtype != other.dtype:
        return True
    # Columns of one matrix lie between each other and share nothing.
    marks = torch.zeros(max(stops) // one.itemsize, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _span_bytes(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((int(size) - 1) * int(step) for size, step in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
