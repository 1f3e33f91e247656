"""DeepSpeed's block ``optimizer`` as options.

Sources: ``DeepSpeedEngine._configure_basic_optimizer`` and the fused optimizers in ``ops`` of DeepSpeed 0.19.6, and
``torch.optim``, from which DeepSpeed takes the optimizers that it does not have. As in DeepSpeed, types are
case-sensitive only for torch's. Each optimizer declares its name there (``zeroir/ir/optimizers``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from zeroir.deepspeed.treatment import (
    Kind,
    differs_from,
    honoured,
    meaningless,
    refused,
    treatment_of,
)
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import OF_DEEPSPEED, Algorithm
from zeroir.ir.optimizers.elsewhere import InDeepSpeed
from zeroir.ir.optimizers.settings import Setting

Rate = Annotated[float, Field(ge=0)]

_IMPLEMENTATION: Final = meaningless("zeroir has one implementation of each optimizer")


class OptimizerParams(BaseModel):
    """``optimizer.params``, the arguments of the optimizer's constructor; defaults are DeepSpeed's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: Annotated[Rate, honoured("`lr`")] = 1e-3
    max_grad_norm: Annotated[
        float, refused("DeepSpeed refuses it, too; use gradient_clipping", lambda _: True)
    ] = 0.0
    maximize: Annotated[bool, refused("zeroir minimises the loss")] = False
    differentiable: Annotated[bool, refused("zeroir does not differentiate an update")] = False
    foreach: Annotated[bool | None, _IMPLEMENTATION] = None
    fused: Annotated[bool | None, _IMPLEMENTATION] = None
    capturable: Annotated[bool, _IMPLEMENTATION] = False
    set_grad_none: Annotated[bool, _IMPLEMENTATION] = True


def _params(algorithm: Algorithm, declared: InDeepSpeed) -> type[OptimizerParams]:
    """Create the model of an optimizer's parameters: the common ones, its settings, and its switches."""
    settings: dict[str, list[Setting]] = {}
    for setting in algorithm.declaration.settings:
        for key, _ in setting.torch_places:
            settings.setdefault(key, []).append(setting)
    # Their types are only known at run time.
    fields: dict[str, Any] = {}
    if "lr" in declared.defaults:
        fields["lr"] = (Annotated[Rate, honoured("`lr`")], declared.defaults["lr"])
    for key, of_key in settings.items():
        default = declared.defaults.get(key, _default(of_key))
        names = " and ".join(f"`{setting.name}`" for setting in of_key)
        more = [declared.reasons[key]] if key in declared.reasons else []
        more += ["absent it is DeepSpeed's default"] if key == "weight_decay" else []
        reason = honoured("; ".join([names, *more]))
        fields[key] = (Annotated[_annotation(of_key, default), reason], default)
    for switch in declared.switches:
        treatment = honoured(switch.reason)
        if switch.is_refused:
            treatment = refused(switch.reason, differs_from(switch.default))
        fields[switch.name] = (Annotated[bool, treatment], switch.default)
    model: type[OptimizerParams] = create_model(
        f"{declared.types[0]}Params", __base__=OptimizerParams, **fields
    )
    return model


def _default(settings: Sequence[Setting]) -> object:
    first, *others = (setting.default for setting in settings)
    return (first, *others) if others else first


def _annotation(settings: Sequence[Setting], default: object) -> object:
    """Return the type of a key's value; a number whose default is null may be null."""
    defaults = default if isinstance(default, tuple) else (default,)
    kinds = []
    for setting, own_default in zip(settings, defaults, strict=True):
        limits = setting.limits
        kind: Any = Annotated[
            type(setting.default),
            Field(ge=limits.at_least, gt=limits.above, le=limits.at_most, lt=limits.below),
        ]
        kinds.append(kind | None if own_default is None else kind)
    return tuple.__class_getitem__(tuple(kinds)) if len(kinds) > 1 else kinds[0]


OPTIMIZERS: Final[Mapping[str, type[OptimizerParams]]] = {
    name: model
    for algorithm in Algorithm
    if (declared := algorithm.declaration.deepspeed) is not None
    for model in [_params(algorithm, declared)]
    for name in declared.types
}
_REASONS: Final = {
    str(algorithm): reason
    for algorithm in Algorithm
    if (reason := algorithm.declaration.not_from_deepspeed) is not None
}
"""The reasons for optimizers that zeroir has, but does not accept from this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTranslation:
    """Options by name with the keys that they come from, and pairs of an ignored key and the reason."""

    options: Mapping[str, tuple[object, str]]
    notes: tuple[tuple[str, str], ...]


def translate_optimizer(kind: str, params: Mapping[str, object]) -> OptimizerTranslation:
    """Translate the block to options.

    Raises:
        UserError: naming the optimizer, or a parameter of it, that zeroir lacks.
    """
    own = {name.lower(): name for name, known in OF_DEEPSPEED.items() if not known.is_from_torch}
    name = own.get(kind.lower(), kind)
    if name not in OPTIMIZERS:
        takes = f"zeroir has no optimizer {kind}; from this file it takes {', '.join(OPTIMIZERS)}"
        reason = _REASONS.get(kind.lower(), takes)
        raise UserError(f"optimizer.type cannot be honoured: {reason}.")
    model = OPTIMIZERS[name]
    keys = _validated(model, kind, params).model_dump()
    algorithm = next(a for a in Algorithm if a.declaration.deepspeed is OF_DEEPSPEED[name])
    declared = OF_DEEPSPEED[name]
    values: dict[str, object] = {}
    places: dict[str, str] = {"optimizer": "optimizer.type", "lr": "optimizer.params.lr"}
    for setting in algorithm.declaration.settings:
        for key, index in setting.torch_places:
            value = keys[key] if index is None else keys[key][index]
            places[setting.name] = f"optimizer.params.{key}"
            if value is not None:
                values[setting.name] = value
    options = {
        "optimizer": str(algorithm)
        if declared.optimizer is None
        else declared.optimizer(name, keys),
        **declared.settings(name, keys, values),
        "lr": keys["lr"],
    }
    notes = [
        (f"optimizer.params.{key}", treatment_of(model.model_fields[key]).reason)
        for key in params
        if treatment_of(model.model_fields[key]).kind is Kind.WITHOUT_MEANING
    ]
    return OptimizerTranslation(
        options={option: (value, places[option]) for option, value in options.items()},
        notes=tuple(notes),
    )


def _validated(
    model: type[OptimizerParams], kind: str, params: Mapping[str, object]
) -> OptimizerParams:
    """Validate the parameters, and check that refused ones have values without effect."""
    for key, value in params.items():
        field = model.model_fields.get(key)
        if field is None:
            nearest = difflib.get_close_matches(key, model.model_fields, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "."
            raise UserError(f"{kind} has no parameter optimizer.params.{key}{hint}")
        treatment = treatment_of(field)
        if treatment.kind is Kind.REFUSED and treatment.asks(value):
            raise UserError(f"optimizer.params.{key} cannot be honoured: {treatment.reason}.")
    try:
        return model.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] in ("missing", "too_long"):  # of the numbers in a list
            name = str(first["loc"][0])
            amount = "few" if first["type"] == "missing" else "many"
            raise UserError(
                f"optimizer.params.{name} is {params[name]!r:.60}, which has too {amount} numbers."
            ) from None
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(
            f"optimizer.params.{key} is {first['input']!r:.60}, but should be {expected}."
        ) from None
