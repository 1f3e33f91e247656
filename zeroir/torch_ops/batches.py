"""Batches: nested containers of tensors and constants, by path.

The path of a tensor or constant consists of positions, keys and names of fields, joined by dots, such as ``0``,
``labels`` or ``images.0``. The path of a batch that is one tensor is ``0``. The compiler and the runtime both use these
functions, so that a path means the same to both.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from zeroir.errors import BatchError
from zeroir.ir.program import Constant

Batch = object
"""One rank's micro-batch.

It is made of dense tensors and constants (None, bool, int, float, str) in tuples, named tuples, lists, dicts and other
mappings, and dataclasses, nested in any way; or it is one tensor.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLeaves:
    """The tensors and the constants of a batch by path, in the order of the batch."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)


def flatten(batch: Batch, name: str = "the batch") -> BatchLeaves:
    """Collect the tensors and constants of a batch. ``name`` is that of the batch in messages.

    Raises:
        BatchError: if it contains anything but dense tensors with values and constants, or two paths are equal.
    """
    leaves = BatchLeaves()
    if isinstance(batch, Tensor):
        _add_tensor(batch, "0", leaves, name)
    else:
        _collect(batch, "", leaves, name)
    return leaves


def with_tensors(batch: T, replace: Callable[[Tensor], Tensor]) -> T:
    """Rebuild a batch with each tensor replaced, calling ``replace`` in the order of ``flatten``.

    Raises:
        TypeError: if an object of the batch cannot be copied.
    """
    return cast("T", _rebuilt(batch, replace))


def undense_kind(tensor: Tensor) -> str | None:
    """Return in words why no dense values can be copied from a tensor; None if they can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "on the meta device, where tensors have no values"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    return None


def is_same_constant(a: Constant, b: Constant) -> bool:
    """Return whether two constants are equal to a program: True is not 1, -0.0 is not 0.0, and NaN is NaN."""
    return type(a) is type(b) and repr(a) == repr(b)


def _add_tensor(tensor: Tensor, path: str, leaves: BatchLeaves, name: str) -> None:
    kind = undense_kind(tensor)
    if kind is not None:
        raise BatchError(
            f"The input {path} of {name} is {kind}; batches are dense tensors with values."
        )
    leaves.tensors[path] = tensor


def _collect(value: object, path: str, leaves: BatchLeaves, name: str) -> None:
    children = _children(value)
    if children is not None:
        for key, item in children:
            _collect(item, f"{path}.{key}" if path else key, leaves, name)
        return
    if path in leaves.tensors or path in leaves.constants:
        raise BatchError(
            f"In {name}, two values have the path {path}: a key with a dot in it looks like nested keys."
        )
    if isinstance(value, Tensor):
        _add_tensor(value, path, leaves, name)
    elif value is None or isinstance(value, _CONSTANTS):
        leaves.constants[path or "0"] = _constant(value)
    else:
        whole = name.replace("the ", "The ", 1) if name.startswith("the ") else name
        subject = f"In {name}, its element {path}" if path else whole
        raise BatchError(
            f"{subject} is of type {type(value).__name__}; a batch holds tensors and constants (None, bool, "
            f"int, float, str) in tuples, lists, dicts and dataclasses{_remedy(value)}."
        )


def _remedy(value: object) -> str:
    """Return how to convert a value that is common in data sets to a part of a batch."""
    match value:
        case np.ndarray() | np.generic():
            return "; make it a tensor with torch.as_tensor"
        case Iterator():
            return "; return one batch instead of yielding several"
        case _:
            return ""


# Tuples of types: a union would be created for each value, and the abstract Mapping is checked last.
_LEAVES = (Tensor, str)
_CONSTANTS = (bool, int, float, str)
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple)


def _children(value: object) -> list[tuple[str, object]] | None:
    """Return the items of a container with their keys; None if it is a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, _MAPPINGS):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, _SEQUENCES):
        return [(str(i), item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return [(name, getattr(value, name)) for name in names]
    return None


def _constant(value: bool | int | float | str | None) -> Constant:
    """Convert a constant to Python's own type: a member of an enumeration to its number or string."""
    match value:
        case None | bool():
            return value
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)


def _rebuilt(value: object, replace: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, Mapping):
        items = {key: _rebuilt(item, replace) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            make: Callable[[object], object] = type(value)
            return make(items)
        # A copy, because the type may have more than items, like Hugging Face's BatchEncoding.
        mapping = copy.copy(value)
        for key, item in items.items():
            mapping[key] = item
        return mapping
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = [_rebuilt(item, replace) for item in value]
        return copied
    if isinstance(value, tuple):
        parts = [_rebuilt(item, replace) for item in value]
        make_tuple: Callable[[object], object] = getattr(value, "_make", type(value))
        return make_tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not by its constructor, which may require other arguments or compute other fields.
        twin = copy.copy(value)
        for name, item in _children(value) or ():
            object.__setattr__(twin, name, _rebuilt(item, replace))
        return twin
    return value
