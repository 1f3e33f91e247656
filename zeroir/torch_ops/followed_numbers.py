"""Numbers of the user's code whose present values count at every step of a program.

While a model is traced, a ``FollowedNumber`` stands for such a number. Arithmetic with plain numbers gives another one,
which knows how to compute itself from the present values. Where it meets a tensor, it becomes a tensor of one element,
a constant of the program, which an engine writes before each step. Results have the bits that the plain number gives.

Every other use reads the value, as comparisons do. The answer is remembered: the program is right as long as the
present values give the same one.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any, Final, Self, TypeGuard, TypeVar, cast
from unittest import mock

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.torch_ops.types import LOW_PRECISION

Number = int | float
Compute = Callable[[], object]
Function = Callable[..., object]

MOST_TENSORS: Final = 1024
"""Expressions of numbers that become tensors in one program; more of them are read."""

_LARGEST: Final = 2**53
"""Larger integers are not all float64 numbers."""


def is_number(value: object) -> TypeGuard[Number]:
    """Return whether a value is a number that a program may follow: of Python's, or a scalar of NumPy's."""
    kind = type(value)
    return kind in (int, float) or (kind.__module__ == "numpy" and kind.__name__ in _OF_NUMPY)


def is_integer(value: object) -> bool:
    """Return whether a number is an integer of Python's or NumPy's."""
    return isinstance(value, Integral)


_OF_NUMPY: Final = frozenset(("float64", "float32", "int64", "int32"))


class FollowedNumbers:
    """The numbers that a program follows.

    ``values`` has their present values by name; ``answers`` are what the trace learnt of them, by a text such as
    ``beta > 0``. With ``are_read`` torch's functions are called with plain numbers.
    """

    def __init__(self, values: Mapping[str, Number], *, are_read: bool = False) -> None:
        self.values = dict(values)
        self._are_read = are_read
        self.answers: dict[str, tuple[Compute, object]] = {}
        self._expressions: dict[str, tuple[int, Compute]] = {}
        # Memory that can be written while torch's operators are traced.
        self._memory = array("d", bytes(8 * MOST_TENSORS))
        self._tensors = torch.frombuffer(self._memory, dtype=torch.float64).unbind()

    @property
    def names(self) -> frozenset[str]:
        """The names of numbers whose value itself was not read."""
        return frozenset(self.values) - frozenset(self.answers)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors of the expressions so far, f64[]."""
        return self._tensors[: len(self._expressions)]

    def number(self, name: str) -> object:
        """Return what stands for a number while a model is traced."""
        return _followed(self, name, lambda: self.values[name])

    def tensor(self, number: FollowedNumber) -> Tensor | None:
        """Return the tensor with the present value of a number, f64[]; None where there is none."""
        if self._are_read:
            return None
        value = _plain(number)
        if number.text not in self._expressions:
            index = len(self._expressions)
            if index == MOST_TENSORS or (is_integer(value) and abs(value) > _LARGEST):
                return None
            self._expressions[number.text] = index, number.compute
            self._memory[index] = value
        return self._tensors[self._expressions[number.text][0]]

    def answer(self, text: str, compute: Compute) -> object:
        """Return something that the trace learns of the numbers, and remember it."""
        answer = compute()
        self.answers.setdefault(text, (compute, answer))
        return answer

    def write_tensors(self) -> None:
        """Write the present values to the tensors.

        Raises:
            UserError: where one cannot be computed.
        """
        for text, (index, compute) in self._expressions.items():
            try:
                self._memory[index] = cast("Number", compute())
            except (ArithmeticError, ValueError) as error:
                raise UserError(f"{text} cannot be computed: {error}.") from None

    def present_answers(self) -> Iterator[tuple[str, object]]:
        """Yield what the trace learnt of those numbers, and the answer for their present values."""
        for text, (compute, _) in self.answers.items():
            if text in self.values:
                continue
            try:
                yield text, compute()
            except (ArithmeticError, ValueError) as error:
                yield text, error


class FollowedNumber:
    """A number that a program follows: its text, and how to compute it from the present values.

    It is no ``float`` or ``int``, whose value code in C reads unseen, and plain numbers, too, as in ``0.5 * step``.
    """

    __slots__ = ("compute", "numbers", "text")

    def __init__(self, numbers: FollowedNumbers, text: str, compute: Compute) -> None:
        self.numbers, self.text, self.compute = numbers, text, compute

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(_read(self))

    def __repr__(self) -> str:
        return cast("str", self.numbers.answer(f"repr({self.text})", lambda: repr(_plain(self))))

    def __format__(self, spec: str) -> str:
        text = f"format({self.text}, {spec!r})"
        return cast("str", self.numbers.answer(text, lambda: format(_plain(self), spec)))

    def __array_ufunc__(
        self,
        function: Any,  # noqa: ANN401 - NumPy need not be installed
        method: str,
        *operands: object,
        **named: object,
    ) -> object:
        """Call a function of NumPy's, whose result is followed, too, where it is one number."""
        are_numbers = all(isinstance(x, FollowedNumber) or is_number(x) for x in operands)
        if method == "__call__" and function.nout == 1 and are_numbers and not named:
            form = f"np.{function.__name__}({', '.join(['{}'] * len(operands))})"
            return _computed(function, form, operands)
        return getattr(function, method)(*with_values(operands), **with_values(named))

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        """Let torch's functions take such a number to the mode that traces them."""
        return NotImplemented


def text_of(value: object) -> str:
    """Return the ``repr`` of a value, for a followed number that of its present value, without a note of it."""
    return repr(_plain(value) if isinstance(value, FollowedNumber) else value)


def _followed(numbers: FollowedNumbers, text: str, compute: Compute) -> object:
    if is_number(compute()):
        return FollowedNumber(numbers, text, compute)
    return numbers.answer(text, compute)


def _plain(number: FollowedNumber) -> Number:
    """Return the value of a number without a note that it was read."""
    return cast("Number", number.compute())


def _read(number: FollowedNumber) -> Number:
    """Return the value of a number, on which the program depends from now on."""
    return cast("Number", number.numbers.answer(number.text, number.compute))


def _present(operand: object) -> Compute:
    return operand.compute if isinstance(operand, FollowedNumber) else lambda: operand


def _text(operand: object) -> str:
    return operand.text if isinstance(operand, FollowedNumber) else repr(operand)


def _computed(
    function: Callable[..., Any], form: str, operands: Sequence[object], *, is_read: bool = False
) -> object:
    """Return a function of numbers, one of which at least is followed."""
    numbers = next(each.numbers for each in operands if isinstance(each, FollowedNumber))
    present = [_present(operand) for operand in operands]
    shown, *further = (
        form.format(*map(_text, operands)),
        *map(_text, operands[form.count("{}") :]),
    )
    text = ", ".join((shown, *further))

    def compute() -> object:
        return function(*(operand() for operand in present))

    return numbers.answer(text, compute) if is_read else _followed(numbers, text, compute)


def _method(
    function: Callable[..., Any], form: str, *, is_read: bool = False, is_reflected: bool = False
) -> Callable[..., object]:
    def method(self: FollowedNumber, *others: object) -> object:
        operands = (self, *others)[:: -1 if is_reflected else 1]
        if all(
            isinstance(other, int | float | FollowedNumber) or is_number(other) for other in others
        ):
            return _computed(function, form, operands, is_read=is_read)
        match others:
            case (Tensor() as x,):
                name = function.__name__.strip("_")
                reflected = None if is_reflected else getattr(Tensor, f"__r{name}__", None)
                if reflected is not None:
                    return reflected(x, self)
                return getattr(torch, name.replace("truediv", "div"))(*operands)
        return NotImplemented

    return method


_BINARY: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "add": (operator.add, "({} + {})"),
    "sub": (operator.sub, "({} - {})"),
    "mul": (operator.mul, "({} * {})"),
    "truediv": (operator.truediv, "({} / {})"),
    "floordiv": (operator.floordiv, "({} // {})"),
    "mod": (operator.mod, "({} % {})"),
    "pow": (operator.pow, "({} ** {})"),
}
_UNARY: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "neg": (operator.neg, "(-{})"),
    "pos": (operator.pos, "(+{})"),
    "abs": (operator.abs, "abs({})"),
    "round": (round, "round({})"),
    "floor": (math.floor, "math.floor({})"),
    "ceil": (math.ceil, "math.ceil({})"),
    "trunc": (math.trunc, "math.trunc({})"),
}
_COMPARISONS: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "eq": (operator.eq, "{} == {}"),
    "ne": (operator.ne, "{} != {}"),
    "lt": (operator.lt, "{} < {}"),
    "le": (operator.le, "{} <= {}"),
    "gt": (operator.gt, "{} > {}"),
    "ge": (operator.ge, "{} >= {}"),
}
_READS: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "bool": (bool, "bool({})"),
    "int": (int, "int({})"),
    "float": (float, "float({})"),
    "index": (operator.index, "{}"),
}

for _name, (_function, _form) in _BINARY.items():
    setattr(FollowedNumber, f"__{_name}__", _method(_function, _form))
    setattr(FollowedNumber, f"__r{_name}__", _method(_function, _form, is_reflected=True))
for _name, (_function, _form) in _UNARY.items():
    setattr(FollowedNumber, f"__{_name}__", _method(_function, _form))
for _name, (_function, _form) in {**_COMPARISONS, **_READS}.items():
    setattr(FollowedNumber, f"__{_name}__", _method(_function, _form, is_read=True))


_OF_MATH: Final = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign"),
    *("cos", "cosh", "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "fmod"),
    *("gamma", "hypot", "isclose", "isfinite", "isinf", "isnan", "ldexp", "lgamma", "log"),
    *("log10", "log1p", "log2", "pow", "radians", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


@contextmanager
def followed_by_math() -> Iterator[None]:
    """Let the functions of Python's ``math`` give followed numbers within the block."""

    def following(name: str, function: Callable[..., Any]) -> Callable[..., object]:
        def call(*operands: object, **named: object) -> object:
            if named or not any(isinstance(each, FollowedNumber) for each in operands):
                return function(*operands, **named)
            form = f"math.{name}({', '.join(['{}'] * len(operands))})"
            return _computed(function, form, operands)

        return call

    with ExitStack() as patches:
        for name in _OF_MATH:
            function = getattr(math, name)
            patches.enter_context(mock.patch.object(math, name, following(name, function)))
        yield


# ---------------------------------------------------------------------------------- where they meet tensors


def has_followed(arguments: object) -> bool:
    """Return whether there is a followed number among arguments."""
    match arguments:
        case FollowedNumber():
            return True
        case tuple() | list():
            return any(map(has_followed, arguments))
        case slice():
            return has_followed((arguments.start, arguments.stop, arguments.step))
        case dict():
            return any(map(has_followed, arguments.values()))
        case _:
            return False


Arguments = TypeVar("Arguments")


def with_values(arguments: Arguments) -> Arguments:
    """Return arguments with the values of followed numbers, which are read by that."""
    return cast("Arguments", _with_values(arguments))


def _with_values(arguments: object) -> object:
    match arguments:
        case FollowedNumber():
            return _read(arguments)
        case tuple() if type(arguments) is tuple:
            return tuple(map(_with_values, arguments))
        case list():
            return list(map(_with_values, arguments))
        case dict():
            return {name: _with_values(value) for name, value in arguments.items()}
        case slice():
            return slice(*map(_with_values, (arguments.start, arguments.stop, arguments.step)))
        case _:
            return arguments


def on_tensors(
    function: Function, args: Sequence[object], kwargs: Mapping[str, object]
) -> Callable[[], object] | None:
    """Return a call of a torch function with tensors instead of followed numbers; None where it needs their values.

    Torch computes with a plain number in the dtype of the tensors, or in FP32 where they have 16 bits; on CPUs, sums of
    16-bit tensors and plain numbers are an exception.
    """
    everything = (*args, *kwargs.values())
    found = [each for each in everything if isinstance(each, FollowedNumber)]
    values = {each.text: each.numbers.tensor(each) for each in found}
    tensors = [each for each in everything if isinstance(each, Tensor)]
    name = getattr(function, "__name__", "")
    if len(found) != sum(map(has_followed, everything)) or None in values.values():
        return None

    def in_dtype(argument: object, dtype: torch.dtype) -> object:
        """Return a number as a tensor of this dtype."""
        if isinstance(argument, FollowedNumber):
            return cast("Tensor", values[argument.text]).to(dtype)
        if isinstance(argument, int | float):
            return torch.full((), argument, dtype=dtype)
        return argument

    def with_numbers_in(dtype: torch.dtype) -> object:
        return function(
            *(in_dtype(each, dtype) for each in args),
            **{key: in_dtype(each, dtype) for key, each in kwargs.items()},
        )

    if name in _MAKERS and len(args) == 1 and not kwargs.keys() - {"dtype", "device"}:
        (number,) = args
        assert isinstance(number, FollowedNumber)
        if type(_plain(number)) not in (int, float) and "dtype" not in kwargs:
            return None  # It has a dtype of its own.
        is_float = isinstance(_plain(number), float)
        usual = torch.get_default_dtype() if is_float else torch.int64
        wanted = kwargs.get("dtype") or usual
        assert isinstance(wanted, torch.dtype)
        return lambda: cast("Tensor", in_dtype(number, wanted)).clone()
    if not tensors or not isinstance(args[0], Tensor | FollowedNumber):
        return None
    x = tensors[-1 if name == "where" else 0]
    if name == "full_like" and len(args) == 2 and not kwargs:
        return lambda: cast("Tensor", in_dtype(args[1], x.dtype)).expand(x.shape).clone()
    if name in _SELECTIONS and x.is_floating_point():
        return lambda: with_numbers_in(x.dtype)
    operation = name.strip("_").removeprefix("i" if name.startswith("__i") else "")
    if operation in ("rtruediv", "rdiv") and isinstance(args[0], Tensor) and not kwargs:

        def quotient() -> object:
            product = on_tensors(torch.mul, (x.reciprocal(), *args[1:]), {})  # as torch does
            assert product is not None
            return product()

        return quotient
    if operation not in _ARITHMETIC or len(args) != 2 or kwargs:
        return None
    value = _plain(found[0])
    dtype = torch.result_type(x, int(value) if is_integer(value) else float(value))
    if "div" in operation and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    wide = torch.float32 if dtype in LOW_PRECISION else dtype
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.startswith("_"))
    if is_in_place:
        function = getattr(torch, operation.replace("truediv", "div"))

    def arithmetic() -> object:
        operands = (each.to(wide) if isinstance(each, Tensor) else each for each in args)
        result = cast("Tensor", function(*(in_dtype(each, wide) for each in operands))).to(dtype)
        return x.copy_(result) if is_in_place else result

    return arithmetic


_MAKERS: Final = frozenset(("tensor", "as_tensor", "scalar_tensor"))
"""Functions that make a tensor of one number."""

_SELECTIONS: Final = frozenset(("clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "where"))
"""Functions whose results are elements of a tensor, or numbers."""

_ARITHMETIC: Final = frozenset(
    (
        *("add", "radd", "sub", "subtract", "rsub", "mul", "rmul", "multiply"),
        *("div", "divide", "true_divide", "truediv"),
    )
)
