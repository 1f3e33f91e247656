"""Nodes of a segment as calls of torch: the operator, and functions that resolve its arguments from values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import zeroir.torch_ops  # noqa: F401 - it registers zeroir's own operators, which segments call
from zeroir.errors import UserError
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import NodeArg, Ref, Symbol
from zeroir.torch_ops.types import TORCH_DTYPE

Value = (
    Tensor
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | bool
    | int
    | float
    | str
    | None
    | list["Value"]
)
Resolve = Callable[[Sequence[Tensor | None]], Value]
"""A function that returns one argument of a call, given the values of a segment by index."""


def operator(name: str) -> torch._ops.OpOverload:
    """Return torch's operator for a name such as ``aten.mm.default``.

    UserError where this version of torch lacks it.
    """
    parts = name.split(".")
    try:
        namespace, packet, overload = parts
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError, ValueError):
        raise UserError(
            f"The program calls the operator {name}, which torch {torch.__version__} does not have; "
            "compile it again with this version of torch."
        ) from None
    if not isinstance(function, torch._ops.OpOverload):
        raise UserError(f"The program calls {name}, which is not an operator of torch.")
    return function


def constant(arg: NodeArg, device: torch.device) -> Value:
    """Return an argument that uses no value of the segment."""
    match arg:
        case Symbol(name="device"):
            return device
        case Symbol():
            value = getattr(torch, arg.name, None)
            if isinstance(value, torch.layout | torch.memory_format):
                return value
            raise UserError(
                f"The program names '{arg.name}', which torch does not know; compile it again."
            )
        case DType():
            return TORCH_DTYPE[arg]
        case tuple():
            return [constant(item, device) for item in arg]
        case Ref():
            raise AssertionError("a value of the segment is no constant")
        case _:
            return arg


def has_ref(arg: NodeArg) -> bool:
    """Return whether an argument uses a value of the segment."""
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(has_ref, arg)))


def resolver(arg: NodeArg, device: torch.device) -> Resolve:
    """Return a function that resolves the argument in each call."""
    if isinstance(arg, Ref):
        index = arg.index
        return lambda values: values[index]
    if isinstance(arg, tuple) and has_ref(arg):
        items = [resolver(item, device) for item in arg]
        return lambda values: [item(values) for item in items]
    value = constant(arg, device)
    return lambda _: value


def is_multiple(function: torch._ops.OpOverload) -> bool:
    """Return whether an operator returns several tensors, or a list of them."""
    returns = function._schema.returns
    return len(returns) != 1 or str(returns[0].type) == "List[Tensor]"


def out_overload(function: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that writes the operator's one result to a given tensor; None where there is no useful one.

    Overloads that torch generates are useless: they compute the result elsewhere and copy it.
    """
    schema = function._schema
    if len(schema.returns) != 1 or schema.is_mutable:
        return None
    if any(argument.name == "reduction" for argument in schema.arguments):
        # Losses first resize the tensor to the size of their input, and may overwrite its neighbours in memory.
        return None
    expected = [(a.name, str(a.type)) for a in schema.arguments]
    packet = function._overloadpacket
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.is_out]
        inputs = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == 1 and outs[0].name == "out" and inputs == expected:
            assert isinstance(candidate, torch._ops.OpOverload)
            return None if torch.Tag.generated in candidate.tags else candidate
    return None
