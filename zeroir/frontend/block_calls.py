"""What one call of a block did, as data: its calls of torch functions in order, with tensors by number.

Two calls with equal tapes compute the same function of the tensors that they take from outside, whatever Python code
stood behind them: tapes hold every argument of every call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Change = Callable[[Tensor], object]


class UnfitError(Exception):
    """A call of a block does something that a tape cannot hold."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a tape: results count up from 0, what comes from outside counts down from -1."""

    index: int


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operator's types depend on. Strides are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a torch function; ``args``, ``kwargs`` and ``result`` have ``Ref`` in the place of tensors."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    result: object
    has_grad: bool


@dataclass(slots=True, kw_only=True)
class Tape:
    """The calls of torch functions in one call of a block.

    ``outside`` and ``made`` describe the tensors; ``outputs`` are the results that are used after the block, and
    ``sites`` counts the calls of dropout.
    """

    steps: list[Step]
    outside: list[Kind]
    made: list[Kind]
    outputs: list[int]
    sites: int

    def equals(self, other: Tape) -> bool:
        """Whether the other call computes the same function."""
        return (
            self.outside == other.outside
            and self.outputs == other.outputs
            and self.sites == other.sites
            and self.made == other.made
            and len(self.steps) == len(other.steps)
            and all(are_same_steps(a, b) for a, b in zip(self.steps, other.steps, strict=True))
        )


def kind_of(tensor: Tensor) -> Kind:
    """The kind of a tensor.

    Raises:
        UnfitError: for tensors that are not strided.
    """
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            raise UnfitError(f"a tensor of layout {tensor.layout}")
        return Kind(
            dtype=tensor.dtype,
            shape=tuple(int(size) for size in tensor.shape),
            stride=tuple(int(step) for step in tensor.stride()),
            offset=int(tensor.storage_offset()),
            requires_grad=tensor.requires_grad,
        )


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    type(None),
    type(...),
)


def mapped(value: object, change: Change) -> object:
    """A value with its tensors changed.

    Raises:
        UnfitError: where something in it is neither a tensor nor a constant that can be compared.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (*_PLAIN, Ref)):
        return value
    if isinstance(value, tuple):
        return _tuple_like(value, [mapped(item, change) for item in value])
    if type(value) is list:
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    raise UnfitError(f"a {type(value).__name__}")


def filled(value: object, tensors: Callable[[int], object]) -> object:
    """A value of a tape with tensors in the place of their numbers."""
    if isinstance(value, Ref):
        return tensors(value.index)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return _tuple_like(value, [filled(item, tensors) for item in value])
    if isinstance(value, list):
        return [filled(item, tensors) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, tensors) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(filled(part, tensors) for part in (value.start, value.stop, value.step)))
    return value


def _tuple_like(value: tuple[object, ...], items: list[object]) -> tuple[object, ...]:
    if type(value) is tuple:
        return tuple(items)
    make: Callable[..., tuple[object, ...]] | None = getattr(value, "_make", None)  # a named tuple
    if make is not None:
        return make(items)
    if type(value).__module__ == "torch.return_types":
        return type(value)(items)
    raise UnfitError(f"a {type(value).__name__}")


def refs_in(value: object) -> list[int]:
    """The numbers of the tensors in a value of a tape, in order."""
    found: list[int] = []
    filled(value, found.append)
    return found


def are_same_steps(one: Step, other: Step) -> bool:
    """Whether two calls are of the same function with the same arguments and result."""
    return (
        are_same_calls(one, other.function, other.args, other.kwargs)
        and one.has_grad == other.has_grad
        and are_same(one.result, other.result)
    )


def are_same_calls(
    step: Step, function: Callable[..., object], args: object, kwargs: object
) -> bool:
    """Whether a step calls this function with these arguments."""
    # A property's getter is a new object each time.
    return step.function == function and are_same(step.args, args) and are_same(step.kwargs, kwargs)


def are_same(one: object, other: object) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        assert isinstance(other, tuple | list)
        return len(one) == len(other) and all(
            are_same(a, b) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, slice):
        assert isinstance(other, slice)
        parts = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return all(are_same(a, b) for a, b in parts)
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return one == other
