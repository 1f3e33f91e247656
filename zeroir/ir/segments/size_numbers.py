"""Numbers with a fraction that code computes of sizes, such as ``1 / length`` or ``math.sqrt(length)``.

A ``SizeNumber`` is such a computation, and a float: its value where each dim has its largest value. For a batch it is
computed as Python does, in the order of the code, so that its bits are those of eager PyTorch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from zeroir.ir.sizes import Dim, Size

Operand = int | float
"""A plain number, a size, or what is computed of sizes."""

FUNCTIONS: Final[Mapping[str, tuple[int, Callable[..., float]]]] = {
    "float": (1, float),
    "neg": (1, operator.neg),
    "sqrt": (1, math.sqrt),
    "exp": (1, math.exp),
    "log": (1, math.log),
    "log2": (1, math.log2),
    "add": (2, operator.add),
    "sub": (2, operator.sub),
    "mul": (2, operator.mul),
    "div": (2, operator.truediv),
    "pow": (2, operator.pow),
}
"""The functions by name, each with the number of its operands."""

FUNCTION_TEXT: Final = re.compile(rf"({'|'.join(FUNCTIONS)})\(")
"""How the text of a number begins."""


class SizeNumber(float):
    """A function of sizes and other numbers; see the module's docstring."""

    function: str
    operands: tuple[Operand, ...]

    def __new__(cls, function: str, operands: tuple[Operand, ...]) -> SizeNumber:
        count, compute = FUNCTIONS[function]
        assert len(operands) == count
        try:
            value = float(compute(*map(_plain, operands)))
        except (ArithmeticError, TypeError, ValueError):
            value = math.nan
        number = super().__new__(cls, value)
        number.function, number.operands = function, operands
        return number

    @property
    def plain(self) -> float:
        """The value where each dim is as large as it may be, a plain float."""
        return float.__add__(self, 0.0) if self else 0.0

    @property
    def sizes(self) -> Iterator[Size]:
        """The sizes in it that depend on dims."""
        for operand in self.operands:
            if isinstance(operand, SizeNumber):
                yield from operand.sizes
            elif isinstance(operand, Size):
                yield operand

    def at(self, values: Mapping[str, int]) -> float:
        """Return the value where the dims have these values, by name."""

        def plain(operand: Operand) -> Operand:
            if isinstance(operand, SizeNumber):
                return operand.at(values)
            return operand.at(values) if isinstance(operand, Size) else operand

        return self.changed(plain).plain

    def replaced(self, values: Mapping[Dim, int]) -> float:
        """Return the number where these dims are these sizes; a plain float where no dim is left."""

        def other(operand: Operand) -> Operand:
            if isinstance(operand, Size | SizeNumber):
                return operand.replaced(values)
            return operand

        number = self.changed(other)
        return number.plain if next(number.sizes, None) is None else number

    def changed(self, change: Callable[[Operand], Operand]) -> SizeNumber:
        """Return the number of other operands."""
        return SizeNumber(self.function, tuple(map(change, self.operands)))

    def __reduce__(self) -> tuple[type[SizeNumber], tuple[str, tuple[Operand, ...]]]:
        return SizeNumber, (self.function, self.operands)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SizeNumber) or str(self) != str(other):
            return False
        return tuple(self.sizes) == tuple(other.sizes)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        """Return the text, such as ``div(1, sqrt(length))``."""
        return f"{self.function}({', '.join(map(_text, self.operands))})"

    __repr__ = __str__


def _plain(operand: Operand) -> Operand:
    if isinstance(operand, SizeNumber):
        return operand.plain
    return operand.at_bound if isinstance(operand, Size) else operand


def _text(operand: Operand) -> str:
    return str(operand) if isinstance(operand, int | SizeNumber) else repr(operand)
