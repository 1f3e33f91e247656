"""The keywords of the public functions, as types for editors and type checkers.

Each is a field of ``CompileOptions`` or ``EstimateOptions``, which validate the values and describe them. Related
options are one object, such as ``zeroir.Offload(...)``, which may be shortened to its first option.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, TypedDict, cast

from zeroir.config.communication import Communication, Prefetch, Unshard
from zeroir.config.loss_scale import LossScale
from zeroir.config.offload import Offload
from zeroir.config.optimizer import OptimizerOptions
from zeroir.config.options import CompileOptions
from zeroir.config.precision import FloatName, Precision
from zeroir.config.steps import Evaluate, MicroSteps, Recompute
from zeroir.config.table import OptionObject, object_type
from zeroir.config.units import Units
from zeroir.cost.estimate_options import Optimizer
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import Algorithm, OptimizerName


class TorchOptimizer(Protocol):
    """An optimizer of ``torch.optim``."""

    param_groups: list[dict[str, object]]

    def step(self) -> object:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Clear the gradients."""


class CompileKeywords(TypedDict, total=False):
    """The options of ``zeroir.compile`` as keywords; each has a default."""

    stage: int
    mesh: str | None
    world_size: int
    units: str | Units | None
    precision: FloatName | Precision
    micro_steps: int | MicroSteps
    shapes: object
    evaluate: bool | Evaluate
    optimizer: (
        Algorithm
        | OptimizerName
        | OptimizerOptions
        | type[TorchOptimizer]
        | TorchOptimizer
        | Sequence[TorchOptimizer]
    )
    lr: float
    optimizer_bits: Literal[32, 8]
    schedule: str | None
    group: str | Sequence[str] | Mapping[str, Mapping[str, object]]
    clip: float | None
    ema: float | None
    prefetch: int | Prefetch
    communication: Communication
    recompute: str | Sequence[str] | Recompute
    unshard: str | Sequence[str] | Unshard
    offload: str | Sequence[str] | Offload
    loss_scale: float | LossScale | None


KEYWORDS: Final = tuple(CompileKeywords.__annotations__)


class EstimateKeywords(TypedDict, total=False):
    """The keywords of ``zeroir.estimate``; each has a default."""

    world_size: int
    optimizer: Optimizer
    precision: FloatName
    master: bool
    ema: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    seq: int | None
    batch: int
    vocab: int | None
    recompute: bool
    flash: bool
    offload: str | Sequence[str] | Offload
    optimizer_bits: Literal[32, 8]


def is_torchs(optimizer: object) -> bool:
    """Return whether an optimizer is a class or instance of torch's, without importing torch."""
    return not (optimizer is None or isinstance(optimizer, str | OptimizerOptions))


def flat_values(
    keywords: Mapping[str, object], kind: type[OptionObject] = CompileOptions
) -> dict[str, object]:
    """Return the options in keywords by flat name: those set in an object, or the first option of its class.

    Raises:
        UserError: on the first keyword that does not exist, has an object of another class, or repeats an option.
    """
    flat: dict[str, object] = {}
    allowed = KEYWORDS if kind is CompileOptions else tuple(kind.model_fields)
    for name, value in keywords.items():
        if name not in allowed:
            raise UserError(_unknown(name, kind, allowed))
        given = {name: value}
        if isinstance(value, OptionObject):
            field = kind.model_fields.get(name)
            expected = None if field is None else object_type(field)
            if expected is None or not isinstance(value, expected):
                other = f"zeroir.{expected.__name__}" if expected else "a plain value"
                raise UserError(
                    f"{name}= is a zeroir.{type(value).__name__}, but should be {other}."
                )
            given = value.given
        for option, each in given.items():
            if option in flat:
                raise UserError(f"{option} is given twice, as {flat[option]!r} and as {each!r}.")
            flat[option] = each
    return flat


def merged(defaults: CompileKeywords, given: CompileKeywords) -> CompileKeywords:
    """Merge keywords: given ones override defaults, and a default for an object's first option fills it in."""
    plain = cast("Mapping[str, object]", defaults)
    values: dict[str, object] = {**plain, **given}
    for name, value in given.items():
        if name in plain and isinstance(value, OptionObject):
            first = next(iter(type(value).model_fields))
            own = {each: getattr(value, each) for each in value.model_fields_set}
            values[name] = type(value).model_validate({first: plain[name], **own})
    return cast("CompileKeywords", values)


def _unknown(name: str, kind: type[OptionObject], allowed: Sequence[str]) -> str:
    row = kind.rows().get(name)
    if row is not None and len(row.path) > 1:
        keyword, attribute = row.path[0], row.path[-1]
        field = object_type(kind.model_fields[keyword])
        if field is OptimizerOptions:
            return (
                f"There is no keyword {name}=: set {attribute} in an optimizer, such as "
                f"optimizer=zeroir.optim.AdamW(...), or in one of torch.optim."
            )
        assert field is not None
        return f"There is no keyword {name}=: write {keyword}=zeroir.{field.__name__}({attribute}=...)."
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]}=?" if near else f"the keywords are {', '.join(allowed)}."
    return f"There is no keyword {name}=; {hint}"
