"""Tensors of a batch whose sizes depend on dims, while a model is traced, and such sizes in its code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import FunctionType, UnionType
from typing import Final

import torch

from zeroir.config.shapes import BatchShapes
from zeroir.errors import UserError
from zeroir.frontend._torch_sizes import DimEnv
from zeroir.frontend.source.imports import is_known_package
from zeroir.ir.sizes import Dim, Size

_KINDS: Final = ((torch.SymInt, 0), (torch.SymFloat, 0.0), (torch.SymBool, False))
"""Torch's classes, and a plain value of the class that each stands for."""


def dim_env(
    shapes: BatchShapes, examples: Mapping[str, tuple[int, ...]]
) -> tuple[DimEnv | None, dict[str, tuple[int, ...]]]:
    """Return the symbols of the dims of a batch, None without any, and the shapes of all its tensors by path.

    Raises:
        UserError: where the example batch does not have such shapes.
    """
    values: dict[Dim, int] = {}
    sizes = dict(examples)
    for path, shape in shapes.items():
        example = examples.get(path)
        if example is None:
            raise UserError(
                f"The shapes name the input {path}, which the batch does not have; it has {', '.join(examples)}."
            )
        if len(shape) != len(example):
            raise UserError(
                f"The shape of the input {path} has {len(shape)} dimensions, and the batch's tensor has {len(example)}."
            )
        sizes[path] = tuple(
            _noted(
                number if size is None else size,
                number,
                f"Dimension {axis} of the input {path}",
                values,
            )
            for axis, (size, number) in enumerate(zip(shape, example, strict=True))
        )
    return (DimEnv(values) if values else None), sizes


def _noted(size: int, number: int, where: str, values: dict[Dim, int]) -> int:
    """Return the size, after the value that the example batch gives its dim is noted."""
    if not isinstance(size, Size):
        if size != number:
            raise UserError(f"{where} is {size} by the shapes and {number} in the example batch.")
        return size
    linear = size.linear
    assert linear is not None  # a user gives no other sizes
    dim, value = linear.dim, linear.value_of_dim(number)
    if value is None:
        raise UserError(
            f"{where} is {number} in the example batch, but should be {size} with {dim.name} from {dim.minimum} to "
            f"{dim.maximum}."
        )
    if values.setdefault(dim, value) != value:
        raise UserError(
            f"{where} gives the dim {dim.name} the value {value}, and another one gives it {values[dim]} in the "
            "example batch: give dims that differ names of their own."
        )
    return size


def sizes_of(
    shape: Sequence[int], env: DimEnv | None, values: Mapping[Dim, int]
) -> list[int | torch.SymInt]:
    """Return a shape as torch computes with it, where some dims have these values."""
    if env is None:
        return [*shape]
    return [env.symint(size.replaced(values) if isinstance(size, Size) else size) for size in shape]


def _isinstance(value: object, classes: type | tuple[type, ...] | UnionType) -> bool:
    return isinstance(value, classes) or any(
        isinstance(value, kind) and isinstance(plain, classes) for kind, plain in _KINDS
    )


def _len(value: Sized) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


_BUILTINS: Final[Mapping[str, Callable[..., object]]] = {"isinstance": _isinstance, "len": _len}
"""What stands for a function of Python."""


@contextmanager
def sizes_are_integers(functions: Iterable[FunctionType]) -> Iterator[None]:
    """Let functions of Python know sizes in the modules of functions, but not in Python's and torch's own.

    ``isinstance`` takes them for integers. Torch's sizes that depend on dims are no ``int``: code that asks, such as
    ``slice(-n, None) if isinstance(n, int) else n`` of transformers' models, would go another way than in eager
    PyTorch. ``len`` of a tensor returns one, as Python's own cannot.
    """
    namespaces = {
        id(each.__globals__): each.__globals__
        for each in functions
        if not is_known_package(each.__module__)
    }
    replaced = [
        (namespace, name)
        for namespace in namespaces.values()
        for name in _BUILTINS
        if name not in namespace
    ]
    for namespace, name in replaced:
        namespace[name] = _BUILTINS[name]
    try:
        yield
    finally:
        for namespace, name in replaced:
            del namespace[name]
