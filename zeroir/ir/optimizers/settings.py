"""The declaration of each hyper-parameter of an optimizer: its default, its limits, and its effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zeroir.ir.limits import LARGEST_SCALAR

Value = bool | int | float | str | tuple[float, ...]
"""A switch, a whole number, a number, one of several choices, or several numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The range of a number; where an end is None, the largest scalar is the limit."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            abs(number) <= LARGEST_SCALAR
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        ends = (
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return " and ".join(f"{name} {end:g}" for name, end in ends if end is not None)


UNLIMITED: Final = Limits()
NOT_NEGATIVE: Final = Limits(at_least=0)
FRACTION: Final = Limits(at_least=0, below=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A hyper-parameter other than the learning rate, with the name of its option.

    The type of the default is the type of every value. ``effect`` is its description in the help. ``choices`` are the
    values of a text; programs store the index of one. torch has the setting under its own name, or as an element of the
    pair ``torch_pair``. A setting is ``fixed`` if the optimizer has no such option: programs store its default, and
    the text is the reason.
    """

    name: str
    default: Value
    effect: str = ""
    limits: Limits = UNLIMITED
    choices: tuple[str, ...] = ()
    torch_pair: tuple[str, int] | None = None
    fixed: str | None = None

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The names of its numbers in programs."""
        if isinstance(self.default, tuple):
            return tuple(f"{self.name}.{index}" for index in range(len(self.default)))
        return (self.name,)

    @property
    def torch_places(self) -> tuple[tuple[str, int | None], ...]:
        """For each of these numbers the key of torch's groups, and the index where the key has several numbers."""
        if isinstance(self.default, tuple):
            return tuple((self.name, index) for index in range(len(self.default)))
        return ((self.name, None) if self.torch_pair is None else self.torch_pair,)

    def numbers(self, value: Value) -> tuple[float, ...]:
        """Return the numbers of a value in programs."""
        if isinstance(value, tuple):
            return value
        return (float(self.choices.index(value) if isinstance(value, str) else value),)

    def value(self, number: float) -> bool | int | float | str:
        """Return the value, or the element of several, for a number in programs."""
        match self.default:
            case bool():
                return bool(number)
            case int():
                return int(number)
            case str():
                return self.choices[int(number)]
            case _:
                return number

    def allows(self, number: float) -> bool:
        """Return whether programs may have this number."""
        match self.default:
            case bool():
                return True
            case int():
                return number in self.limits and float(number).is_integer()
            case str():
                return number in range(len(self.choices))
            case _:
                return number in self.limits

    @property
    def expected(self) -> str:
        """The expected value, as the end of a sentence."""
        if self.choices:
            return " or ".join(self.choices)
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        return f"{kind} of {self.limits}" if str(self.limits) else kind


LEARNING_RATE: Final = Setting(name="lr", default=1e-3, effect="learning rate", limits=NOT_NEGATIVE)
"""The setting that every optimizer has, and programs store separately."""


def weight_decay(default: float) -> Setting:
    """Return the weight decay, which every optimizer has."""
    return Setting(name="weight_decay", default=default, effect="weight decay", limits=NOT_NEGATIVE)


def momentum(default: float) -> Setting:
    """Return the factor of the momentum."""
    return Setting(name="momentum", default=default, effect="momentum factor", limits=FRACTION)


def nesterov(default: bool) -> Setting:
    """Return whether the momentum is Nesterov's."""
    return Setting(name="nesterov", default=default, effect="Nesterov momentum")


def betas(first: float, second: float, of_second: str) -> tuple[Setting, Setting]:
    """Return the decays of the moving averages, a pair in torch; ``of_second`` says what the second one decays."""
    return (
        Setting(
            name="beta1",
            default=first,
            effect="decay of exp_avg",
            limits=FRACTION,
            torch_pair=("betas", 0),
        ),
        Setting(
            name="beta2",
            default=second,
            effect=f"decay of {of_second}",
            limits=FRACTION,
            torch_pair=("betas", 1),
        ),
    )


def nesterov_problem(values: Mapping[str, float]) -> str | None:
    """Return why Nesterov momentum is impossible with these numbers of a program; None if it is possible."""
    if values["nesterov"] and (values.get("dampening") or not values["momentum"]):
        return "nesterov needs a momentum above 0 and no dampening"
    return None
