"""All optimizers, and the options that correspond to their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Self

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers import (
    adafactor,
    adam,
    lion,
    muon,
    sgd,
    shampoo,
)
from zeroir.ir.optimizers.declaration import Declaration, OwnState
from zeroir.ir.optimizers.elsewhere import InDeepSpeed, Values
from zeroir.ir.optimizers.settings import Limits, Setting, Value


class Algorithm(StrEnum):
    """Optimizers, with their names in programs and options."""

    _value_: str
    declaration: Declaration

    def __new__(cls, name: str, declaration: Declaration | None = None) -> Self:
        """Create a member; for type checkers it is also the look-up by name alone."""
        assert declaration is not None
        algorithm = str.__new__(cls, name)
        algorithm._value_ = name
        algorithm.declaration = declaration
        return algorithm

    SGD = "sgd", sgd.SGD
    MOMENTUM = "momentum", sgd.MOMENTUM
    ADAM = "adam", adam.ADAM
    ADAMW = "adamw", adam.ADAMW
    LION = "lion", lion.LION
    MUON = "muon", muon.MUON
    ADAFACTOR = "adafactor", adafactor.ADAFACTOR
    SHAMPOO = "shampoo", shampoo.SHAMPOO

    @property
    def class_name(self) -> str:
        """Its class in ``torch.optim``, or its name where torch does not have it."""
        of_torch = self.declaration.torch
        return self.declaration.title if of_torch is None else of_torch.class_name

    @property
    def fixed(self) -> Values:
        """The settings that distinguish it from another optimizer of the same class."""
        of_torch = self.declaration.torch
        return {} if of_torch is None else of_torch.fixed

    @property
    def state_names(self) -> tuple[str, ...]:
        """The FP32 states of each element, with their names in torch.optim."""
        return tuple(state.name for state in self.declaration.states)

    @property
    def direction_dtype(self) -> DType | None:
        """The dtype of the directions of an optimizer that works on whole parameters; None for others."""
        whole = self.declaration.whole
        return None if whole is None else whole.direction_dtype

    @property
    def has_states_of_elements(self) -> bool:
        """Whether it keeps states of elements, and each element's step uses nothing but that element and its states."""
        return bool(self.declaration.states) and self.declaration.whole is None

    @property
    def takes_matrices_alone(self) -> bool:
        """Whether it updates only parameters of two dimensions."""
        return self.declaration.whole is not None and self.declaration.whole.takes_matrices_alone

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The elements of ``OptimizerStep.hyper``, in order."""
        return self.declaration.hyper_names


OptimizerName = Literal[
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "lion",
    "muon",
    "adafactor",
    "shampoo",
]
"""The same names for type checkers, which do not support computed ones."""


def with_settings(algorithms: Iterable[Algorithm], settings: Values) -> Algorithm:
    """Return the first of these whose fixed settings have such values, or are missing."""
    return next(
        algorithm
        for algorithm in algorithms
        if all(settings.get(key, value) == value for key, value in algorithm.fixed.items())
    )


USUAL: Final = Algorithm.ADAMW
"""The default optimizer, also of the parameters that another one does not support."""

OF_DEEPSPEED: Final[Mapping[str, InDeepSpeed]] = {
    name: declared
    for algorithm in Algorithm
    if (declared := algorithm.declaration.deepspeed) is not None
    for name in declared.types
}
"""The values of ``optimizer.type`` in DeepSpeed's configuration, and their optimizers."""

WITH_STATES_OF_ELEMENTS: Final = tuple(a for a in Algorithm if a.has_states_of_elements)
"""The optimizers whose states can have 8 bits."""

OWN_STATES: Final[Mapping[str, OwnState]] = {
    own.quantity: own
    for algorithm in Algorithm
    if (own := algorithm.declaration.own_state) is not None
}
"""The states of whole parameters by their quantities."""

OWN_STATES_OF_TORCH: Final = frozenset(
    algorithm.declaration.own_state.quantity
    for algorithm in Algorithm
    if algorithm.declaration.own_state is not None and algorithm.declaration.torch is not None
)
"""Those of optimizers that torch has as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOption:
    """A compiler option that is a setting of some optimizers, with its default for each of them.

    Its type, limits and choices are those of each of these settings.
    """

    name: str
    settings: Mapping[Algorithm, Setting]

    @property
    def defaults(self) -> Mapping[Algorithm, Value]:
        """The default value for each optimizer."""
        return {algorithm: setting.default for algorithm, setting in self.settings.items()}

    @property
    def limits(self) -> Limits:
        """The range of a number."""
        return self._any.limits

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a text."""
        return self._any.choices

    @property
    def kind(self) -> type[Value]:
        """The type of a value."""
        return type(self._any.default)

    @property
    def users(self) -> str:
        """The optimizers for which the option has an effect, as a list for a sentence."""
        *most, last = map(str, self.settings)
        return f"{', '.join(most)} or {last}" if most else last

    @property
    def effect(self) -> str:
        """A sentence on the meaning of the setting, and for which optimizers."""
        effects: dict[str, list[str]] = {}
        for algorithm, setting in self.settings.items():
            effects.setdefault(setting.effect, []).append(algorithm)
        is_of_all = len(self.settings) == len(Algorithm) and len(effects) == 1
        text = "; ".join(
            effect if is_of_all else f"{effect} ({', '.join(names)})"
            for effect, names in effects.items()
        )
        return f"{text[0].upper()}{text[1:]}."

    @property
    def default_text(self) -> str:
        """The default, or that of each optimizer."""
        defaults: dict[str, list[str]] = {}
        for algorithm, default in self.defaults.items():
            defaults.setdefault(_shown(default), []).append(algorithm)
        usual = max(defaults, key=lambda value: len(defaults[value]))
        if len(defaults) > 1 and len(defaults[usual]) < _MANY:
            usual = ""
        phrases = [f"{', '.join(defaults[value])} {value}" for value in defaults if value != usual]
        last = f"else {usual}" if phrases else usual
        return "; ".join([*phrases, last] if usual else phrases)

    @property
    def _any(self) -> Setting:
        return next(iter(self.settings.values()))


_MANY: Final = 3
"""The number of optimizers with one default from which on they are not listed."""


def _shown(value: Value) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ",".join(f"{number:g}" for number in value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _options() -> Mapping[str, OptimizerOption]:
    settings: dict[str, dict[Algorithm, Setting]] = {}
    for algorithm in Algorithm:
        for setting in algorithm.declaration.settings:
            if setting.fixed is None:
                settings.setdefault(setting.name, {})[algorithm] = setting
    return {name: OptimizerOption(name=name, settings=of) for name, of in settings.items()}


OPTIONS: Final = _options()
"""The options that have an effect with some optimizer, by name."""
