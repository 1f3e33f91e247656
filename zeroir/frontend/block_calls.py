"""The calls of torch functions that one call of a block makes, as data: in order, with tensors replaced by numbers.

Two calls of blocks with equal call sequences compute the same function of the tensors that they take from outside,
whatever Python code made the calls: a sequence holds every argument of every call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Change = Callable[[Tensor], object]


class UnrecordableError(Exception):
    """A call of a block does something that a call sequence cannot hold."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The number of a tensor in a call sequence: results count up from 0, tensors from outside count down from -1."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties of a tensor on which the types of an operator's results depend. Strides are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a torch function; ``args``, ``kwargs`` and ``result`` hold a ``TensorRef`` for each tensor."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    result: object
    has_grad: bool


@dataclass(slots=True, kw_only=True)
class CallSequence:
    """The calls of torch functions in one call of a block.

    ``inputs`` describe the tensors from outside and ``results`` those that the calls return; ``outputs`` are the
    numbers of the results that are used after the block, and ``sites`` counts the calls of dropout.
    """

    calls: list[TorchCall]
    inputs: list[TensorKind]
    results: list[TensorKind]
    outputs: list[int]
    sites: int

    def equals(self, sequence: CallSequence) -> bool:
        """Whether another sequence computes the same function."""
        return (
            self.inputs == sequence.inputs
            and self.outputs == sequence.outputs
            and self.sites == sequence.sites
            and self.results == sequence.results
            and len(self.calls) == len(sequence.calls)
            and all(_are_same_calls(a, b) for a, b in zip(self.calls, sequence.calls, strict=True))
        )


def kind_of(tensor: Tensor) -> TensorKind:
    """The kind of a tensor.

    Raises:
        UnrecordableError: for tensors that are not strided.
    """
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            raise UnrecordableError(f"a tensor of layout {tensor.layout}")
        return TensorKind(
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
    """A value with ``change`` applied to each of its tensors.

    Raises:
        UnrecordableError: where something in the value is neither a tensor nor a constant that can be compared.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (*_PLAIN, TensorRef)):
        return value
    if isinstance(value, tuple):
        return _tuple_like(value, [mapped(item, change) for item in value])
    if type(value) is list:
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    raise UnrecordableError(f"a {type(value).__name__}")


def filled(value: object, tensors: Callable[[int], object]) -> object:
    """A value of a call sequence with a tensor for each number."""
    if isinstance(value, TensorRef):
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
    raise UnrecordableError(f"a {type(value).__name__}")


def refs_in(value: object) -> list[int]:
    """The numbers of the tensors in a value of a call sequence, in order."""
    numbers: list[int] = []
    filled(value, numbers.append)
    return numbers


def _are_same_calls(left: TorchCall, right: TorchCall) -> bool:
    return (
        is_call_of(left, right.function, right.args, right.kwargs)
        and left.has_grad == right.has_grad
        and are_same(left.result, right.result)
    )


def is_call_of(
    call: TorchCall, function: Callable[..., object], args: object, kwargs: object
) -> bool:
    """Whether a recorded call is of this function with these arguments."""
    # A property's getter is a new object each time.
    return call.function == function and are_same(call.args, args) and are_same(call.kwargs, kwargs)


def are_same(left: object, right: object) -> bool:
    """Equality that distinguishes 1 from 1.0 and True, and 0.0 from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple | list):
        assert isinstance(right, tuple | list)
        return len(left) == len(right) and all(map(are_same, left, right))
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return list(left) == list(right) and all(are_same(left[key], right[key]) for key in left)
    if isinstance(left, slice):
        assert isinstance(right, slice)
        return are_same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, float | complex):
        return repr(left) == repr(right)
    return left == right
