"""The calls of torch functions that a model makes, as data: in order, with tensors replaced by numbers.

Repeated in that order, on tensors of a tracer, the calls compute what the model computes, whatever Python code made
them. Two calls of blocks with equal call sequences compute the same function of their external tensors, because a
sequence contains every argument of every call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zeroir.frontend._torch_sizes import NoPolynomialError, size_of, stride_of
from zeroir.frontend.capture.node_origins import NodeOrigin


class UnrecordableError(Exception):
    """A model does something that recorded calls cannot represent."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The number of a tensor in a call sequence: results count up from 0, external tensors count down from -1."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties of a tensor that determine the types of an operator's results. Strides are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a torch function; ``args``, ``kwargs`` and ``result`` contain a ``TensorRef`` for each tensor."""

    function: Callable[..., object]
    args: object
    kwargs: object
    result: object
    has_grad: bool
    origin: NodeOrigin

    def repeat(self, values: dict[int, Tensor], kinds: Sequence[TensorKind]) -> None:
        """Repeat the call on other tensors, ``values`` by number, and add its results, whose kinds are ``kinds``.

        Raises:
            UnrecordableError: if a result is of another kind.
        """
        args = cast("tuple[object, ...]", filled(self.args, values.__getitem__))
        kwargs = cast("dict[str, object]", filled(self.kwargs, values.__getitem__))
        with torch.set_grad_enabled(self.has_grad):
            result = self.function(*args, **kwargs)
        for index, value in zip(refs_in(self.result), tensors_in(result), strict=True):
            if index not in values:
                values[index] = value
                if kind_of(value) != kinds[index]:
                    raise UnrecordableError("a result of another kind")


@dataclass(slots=True, kw_only=True)
class CallSequence:
    """The calls of torch functions in one call of a block.

    ``inputs`` describe the external tensors and ``results`` those that the calls return; ``outputs`` are the numbers of
    the results that are used after the block, and ``sites`` counts the calls of dropout.
    """

    calls: list[TorchCall]
    inputs: list[TensorKind]
    results: list[TensorKind]
    outputs: list[int]
    sites: int

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for sequences that compute the same function.

        It contains the arguments as text, because 1 is equal to 1.0 and True, and 0.0 to -0.0.
        """
        values = [(call.args, call.kwargs, call.result, call.has_grad) for call in self.calls]
        types = (self.inputs, self.results, self.outputs, self.sites)
        return *(call.function for call in self.calls), repr(values), repr(types)


def kind_of(tensor: Tensor) -> TensorKind:
    """Return the kind of a tensor.

    Raises:
        UnrecordableError: for tensors that are not strided, and sizes that are no polynomials of dims.
    """
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            raise UnrecordableError(f"a tensor of layout {tensor.layout}")
        try:
            return TensorKind(
                dtype=tensor.dtype,
                shape=tuple(size_of(size) for size in tensor.shape),
                stride=tuple(stride_of(step) for step in tensor.stride()),
                offset=size_of(tensor.storage_offset()),
                requires_grad=tensor.requires_grad,
            )
        except NoPolynomialError as error:
            raise UnrecordableError(f"a tensor of size {error}") from None


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
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    enum.Enum,
    type(None),
    type(...),
)


def mapped(value: object, change: Callable[[object], object]) -> object:
    """Apply ``change`` to everything in a value that is not a constant, such as tensors and their numbers."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple) and (make := _maker_of(value)) is not None:
        return make([mapped(item, change) for item in value])
    if type(value) is list:
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def _maker_of(value: tuple[object, ...]) -> Callable[[list[object]], object] | None:
    """Return the function that makes a tuple of the same type from items; None for an unknown type."""
    if type(value) is tuple or type(value).__module__ == "torch.return_types":
        return type(value)
    make: Callable[[list[object]], object] | None = getattr(value, "_make", None)  # a named tuple
    return make


def filled(value: object, tensors: Callable[[int], object]) -> object:
    """Return a value of a call sequence with a tensor for each number."""
    return mapped(value, lambda x: tensors(x.index) if isinstance(x, TensorRef) else x)


def refs_in(value: object) -> list[int]:
    """Return the numbers of the tensors in a value of a call sequence, in order."""
    numbers: list[int] = []
    filled(value, numbers.append)
    return numbers


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a value, in order."""
    tensors: list[Tensor] = []
    mapped(value, lambda x: tensors.append(x) if isinstance(x, Tensor) else None)
    return tensors
