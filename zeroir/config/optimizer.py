"""The update rule and its settings, which the optimizers themselves declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from zeroir.config.table import Option, OptionObject
from zeroir.ir.limits import LARGEST_SCALAR
from zeroir.ir.optimizers.catalogue import (
    OPTIONS,
    USUAL,
    WITH_STATES_OF_ELEMENTS,
    Algorithm,
    OptimizerOption,
)
from zeroir.ir.optimizers.settings import Setting, Value

_GROUP: Final = "Optimizer"
_OF_SOME: Final = "Settings of single optimizers"


def as_number(bits: object) -> object:
    """Return a number that a program stores as text, which no literal would match."""
    return int(bits) if isinstance(bits, str) and bits.isdecimal() else bits


def _several_numbers(option: OptimizerOption) -> BeforeValidator:
    """Read numbers of FP32 that are separated by commas."""
    (setting, *_) = option.settings.values()
    assert isinstance(setting.default, tuple)
    count = len(setting.default)

    def read(value: object) -> object:
        if value is None:
            return None
        items = value.split(",") if isinstance(value, str) else value
        try:
            numbers = tuple(map(float, items if isinstance(items, list | tuple) else ()))
            if len(numbers) != count or max(map(abs, numbers)) > LARGEST_SCALAR:
                raise ValueError
        except (TypeError, ValueError):
            raise PydanticCustomError(
                "coefficients",
                "{count} numbers of FP32, such as {example}",
                {"count": count, "example": option.default_text},
            ) from None
        return numbers

    return BeforeValidator(read)


def _field(option: OptimizerOption) -> tuple[Any, None]:
    """Return the type of an option that is a setting of some optimizers; None stands for the default of each."""
    declared = Option(
        group=_GROUP if len(option.settings) == len(Algorithm) else _OF_SOME,
        help=f"{option.effect} [default: {option.default_text}]",
        is_of_group=option.kind is not tuple,
    )
    if option.kind is tuple:
        return Annotated[tuple[float, ...] | None, _several_numbers(option), declared], None
    if option.choices:
        return Annotated[Literal[option.choices] | None, declared], None
    kind: Any = option.kind
    limits = option.limits
    start, stop = limits.at_least, limits.at_most
    if kind is not bool:
        start = -LARGEST_SCALAR if start is None and limits.above is None else start
        stop = LARGEST_SCALAR if stop is None and limits.below is None else stop
    info = Field(ge=start, gt=limits.above, le=stop, lt=limits.below)
    return Annotated[kind | None, info, declared], None


class _OfEveryOptimizer(OptionObject):
    algorithm: Annotated[
        Algorithm,
        Option(
            name="optimizer",
            group=_GROUP,
            help="The update rule, with the semantics of torch.optim.",
            is_of_group=True,
        ),
    ] = USUAL
    lr: Annotated[
        float,
        Field(ge=0, le=LARGEST_SCALAR),
        Option(group=_GROUP, help="Learning rate.", is_of_group=True),
    ] = 1e-3
    no_decay: Annotated[
        bool,
        Option(
            group=_GROUP,
            help="No weight decay for parameters of fewer than two dimensions: norms and biases.",
        ),
    ] = False
    bits: Annotated[
        Literal[32, 8],
        BeforeValidator(as_number),
        Option(
            name="optimizer_bits",
            group=_GROUP,
            help="Bits of an element of the optimizer's states: 8 stores blocks of 256 elements with a scale each "
            f"({', '.join(WITH_STATES_OF_ELEMENTS)}).",
            is_of_run=True,
            is_of_group=True,
        ),
    ] = 32


if TYPE_CHECKING:
    _WithSettings = _OfEveryOptimizer
else:
    _WithSettings = create_model(
        "_WithSettings",
        __base__=_OfEveryOptimizer,
        **{name: _field(option) for name, option in OPTIONS.items()},
    )


class OptimizerOptions(_WithSettings):
    """An update rule with its settings. A setting that is None has the default of the optimizer, that of torch.

    ``zeroir.ir.optimizers`` declares the settings, and which optimizers have them.
    """

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        declaration = self.algorithm.declaration
        problem = declaration.problem(dict(zip(declaration.hyper_names, self.hyper, strict=True)))
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def hyper(self) -> tuple[float, ...]:
        """The contents of ``%hyper``, in the order of ``Algorithm.hyper_names``."""
        return tuple(
            number
            for setting in self.algorithm.declaration.settings
            for number in setting.numbers(self._value(setting))
        )

    @property
    def effective_weight_decay(self) -> float:
        """The weight decay: the default of the optimizer unless given."""
        return dict(zip(self.algorithm.hyper_names, self.hyper, strict=True))["weight_decay"]

    def _value(self, setting: Setting) -> Value:
        """Return the value of a setting of the optimizer, its default unless given."""
        given: Value | None = None if setting.fixed is not None else getattr(self, setting.name)
        return setting.default if given is None else given

    def of_group(self, settings: Mapping[str, str]) -> OptimizerOptions:
        """Return the settings of a group's parameters.

        A group with another optimizer takes over the learning rate, the weight decay, and the bits of its states alone,
        and these only where its states are those of single elements.

        Raises:
            UserError: where one of the settings is wrong.
        """
        optimizer = settings.get("optimizer", self.algorithm)
        values = {name: value for name, value in self.flat.items() if name != "no_decay"}
        if optimizer != self.algorithm:
            bits = ("optimizer_bits",) if optimizer in WITH_STATES_OF_ELEMENTS else ()
            values = {name: values[name] for name in ("lr", "weight_decay", *bits)}
        return OptimizerOptions.from_flat({**values, **settings})

    def with_usual_optimizer(self) -> OptimizerOptions:
        """Return the settings of parameters that the optimizer does not take: the usual one's with this learning rate.

        The weight decay is the same, too, where it is given.
        """
        kept = ("lr", "weight_decay")
        return OptimizerOptions.from_flat({name: self.value(name) for name in kept})

    def without_decay(self) -> OptimizerOptions:
        """Return the same settings with a weight decay of 0."""
        return self.model_copy(update={"weight_decay": 0.0})


GROUP_KEYS: Final = tuple(
    row.name for row in OptimizerOptions.rows().values() if row.option.is_of_group
)
"""The options of the optimizer that a group may set."""
