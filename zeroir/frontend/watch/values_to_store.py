"""Values of tensors that the user's code reads only to store them: ``history.append(y.mean().item())``.

In a trace there are no values. So the code gets an object that it may put anywhere, and that refuses every other use;
the tensor is an output of the program, and the engine stores its value after the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, TypeGuard

from torch import Tensor

from zeroir.frontend.source.source_lines import line_of_code


class ValueToStore:
    """What ``convert`` makes of a tensor of a trace."""

    __slots__ = ("convert", "tensor")

    def __init__(self, tensor: Tensor, convert: Callable[[Tensor], object]) -> None:
        self.tensor = tensor
        self.convert = convert

    # Code that asks for the class, by isinstance, might take another branch than for the value. Torch's may ask.
    @property  # type: ignore[misc]
    def __class__(self) -> type[ValueToStore]:
        if line_of_code(sys._getframe(1).f_code):
            _refuse()
        return ValueToStore

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        _refuse()


def is_to_store(value: object) -> TypeGuard[ValueToStore]:
    """Return whether an object is such a value; ``isinstance`` must not be asked."""
    return type(value) is ValueToStore


def value_to_store(
    function: Callable[..., object], tensor: Tensor, *args: object, **kwargs: object
) -> ValueToStore:
    """Return what stands for the value that one of the functions reads of a tensor of a trace."""

    def convert(computed: Tensor) -> object:
        return function(computed.cpu(), *args, **kwargs)

    return ValueToStore(tensor.detach(), convert)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Stands for a tensor among the leaves of an object, and makes what is stored of its values."""

    convert: Callable[[Tensor], object]


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("a value of a trace is only there to be stored")


_OPERATORS: Final = (
    *("bool", "int", "float", "complex", "index", "hash", "str", "repr", "format", "round"),
    *("iter", "len", "contains", "getitem", "setitem", "call", "enter", "abs", "neg", "pos"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getattr", "reduce_ex", "array", "trunc", "invert"),
    *(
        side + name
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
            *("and", "or", "xor", "lshift", "rshift"),
        )
        for side in ("", "r")
    ),
)
for _operator in _OPERATORS:
    setattr(ValueToStore, f"__{_operator}__", _refuse)
