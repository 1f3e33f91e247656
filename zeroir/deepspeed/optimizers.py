"""DeepSpeed's block ``optimizer`` as options.

Sources: ``DeepSpeedEngine._configure_basic_optimizer``, ``ops/adam/fused_adam.py`` and ``ops/lion/fused_lion.py`` of
DeepSpeed 0.19.6, and ``torch.optim``, from which DeepSpeed takes the optimizers that it does not have. As in DeepSpeed,
the case of a type counts for those of torch alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroir.deepspeed.treatment import (
    Kind,
    differs_from,
    honoured,
    meaningless,
    refused,
    treatment_of,
)
from zeroir.errors import UserError

Rate = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]

_IMPLEMENTATION: Final = meaningless("zeroir has one implementation of each optimizer")
_WEIGHT_DECAY: Final = honoured("`weight_decay`; absent it is DeepSpeed's default")
_BETAS: Final = honoured("`beta1` and `beta2`")


class OptimizerParams(BaseModel):
    """``optimizer.params``, the arguments of the optimizer's constructor; a default is DeepSpeed's."""

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


class AdamParams(OptimizerParams):
    """Of ``Adam`` and ``AdamW``."""

    betas: Annotated[tuple[Beta, Beta], _BETAS] = (0.9, 0.999)
    eps: Annotated[Rate, honoured("`eps`")] = 1e-8
    weight_decay: Annotated[Rate | None, _WEIGHT_DECAY] = None
    adam_w_mode: Annotated[bool, honoured("`optimizer`: Adam is adamw unless this is false")] = True
    torch_adam: Annotated[
        bool,
        honoured("without a meaning but for the default of AdamW's weight_decay, 0.01 in torch"),
    ] = False
    bias_correction: Annotated[
        bool, refused("zeroir's Adam corrects the bias", differs_from(True))
    ] = True
    amsgrad: Annotated[bool, refused("zeroir has no AMSGrad")] = False
    fp32_optimizer_states: Annotated[
        bool, refused("optimizer states are FP32 in zeroir", differs_from(True))
    ] = True


class LionParams(OptimizerParams):
    """Of ``Lion``."""

    betas: Annotated[tuple[Beta, Beta], _BETAS] = (0.9, 0.999)
    weight_decay: Annotated[Rate, _WEIGHT_DECAY] = 0.0


class SGDParams(OptimizerParams):
    """Of ``SGD``, which is torch's."""

    momentum: Annotated[Beta, honoured("`momentum`; above 0 it makes `optimizer` momentum")] = 0.0
    dampening: Annotated[Rate, honoured("`dampening`")] = 0.0
    weight_decay: Annotated[Rate, _WEIGHT_DECAY] = 0.0
    nesterov: Annotated[bool, honoured("`nesterov`")] = False


class AdafactorParams(OptimizerParams):
    """Of ``Adafactor``, which is torch's."""

    lr: Annotated[Rate, honoured("`lr`")] = 1e-2
    beta2_decay: Annotated[float, Field(le=0), honoured("`beta2_decay`")] = -0.8
    eps: Annotated[tuple[Rate | None, Rate], honoured("`eps` and `eps2`")] = (None, 1e-3)
    d: Annotated[float, Field(ge=1), honoured("`d`")] = 1.0
    weight_decay: Annotated[Rate, _WEIGHT_DECAY] = 0.0


OPTIMIZERS: Final[Mapping[str, type[OptimizerParams]]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Lion": LionParams,
    "SGD": SGDParams,
    "Adafactor": AdafactorParams,
}
_OF_DEEPSPEED: Final = ("Adam", "AdamW", "Lion")
_REASONS: Final = {
    "muon": "DeepSpeed's Muon updates embeddings and the head by an Adam of its own settings; write --optimizer muon "
    "and --group beside a file without this block"
}
"""Of optimizers that zeroir has, but does not take from this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTranslation:
    """Options by name, each with the key that it comes from; and pairs of a key without meaning and the reason."""

    options: Mapping[str, tuple[object, str]]
    notes: tuple[tuple[str, str], ...]


_Params = TypeVar("_Params", bound=OptimizerParams)


def translate_optimizer(kind: str, params: Mapping[str, object]) -> OptimizerTranslation:
    """The block as options.

    Raises:
        UserError: where zeroir lacks the optimizer, or a parameter of it; it is named.
    """
    own = {name.lower(): name for name in _OF_DEEPSPEED}
    name = own.get(kind.lower(), kind)
    if name not in OPTIMIZERS:
        takes = f"zeroir has no optimizer {kind}; from this file it takes {', '.join(OPTIMIZERS)}"
        reason = _REASONS.get(kind.lower(), takes)
        raise UserError(f"optimizer.type cannot be honoured: {reason}.")
    read: OptimizerParams
    match name:
        case "SGD":
            read = _validated(SGDParams, kind, params)
            options = _sgd(read)
        case "Adafactor":
            read = _validated(AdafactorParams, kind, params)
            options = _adafactor(read)
        case "Lion":
            read = _validated(LionParams, kind, params)
            options = {"optimizer": ("lion", "type"), **_betas(read.betas)}
            options["weight_decay"] = (read.weight_decay, "params.weight_decay")
        case _:
            read = _validated(AdamParams, kind, params)
            options = _adam(name, read)
    options["lr"] = (read.lr, "params.lr")
    notes = [
        (f"optimizer.params.{key}", treatment_of(type(read).model_fields[key]).reason)
        for key in params
        if treatment_of(type(read).model_fields[key]).kind is Kind.WITHOUT_MEANING
    ]
    return OptimizerTranslation(
        options={option: (value, f"optimizer.{key}") for option, (value, key) in options.items()},
        notes=tuple(notes),
    )


def _betas(betas: tuple[float, float]) -> dict[str, tuple[object, str]]:
    return {"beta1": (betas[0], "params.betas"), "beta2": (betas[1], "params.betas")}


def _adam(name: str, params: AdamParams) -> dict[str, tuple[object, str]]:
    is_adamw = name == "AdamW" or params.adam_w_mode
    decay = params.weight_decay
    if decay is None:
        # FusedAdam decays nothing by default; torch's AdamW does.
        decay = 0.01 if params.torch_adam and is_adamw else 0.0
    return {
        "optimizer": ("adamw" if is_adamw else "adam", "type"),
        **_betas(params.betas),
        "eps": (params.eps, "params.eps"),
        "weight_decay": (decay, "params.weight_decay"),
    }


def _sgd(params: SGDParams) -> dict[str, tuple[object, str]]:
    options: dict[str, tuple[object, str]] = {
        "optimizer": ("momentum" if params.momentum else "sgd", "type"),
        "weight_decay": (params.weight_decay, "params.weight_decay"),
    }
    if params.momentum:
        options["momentum"] = (params.momentum, "params.momentum")
        options["dampening"] = (params.dampening, "params.dampening")
        options["nesterov"] = (params.nesterov, "params.nesterov")
    elif params.nesterov:
        raise UserError("optimizer.params.nesterov needs a momentum above 0.")
    return options


def _adafactor(params: AdafactorParams) -> dict[str, tuple[object, str]]:
    least, least_scale = params.eps
    options: dict[str, tuple[object, str]] = {
        "optimizer": ("adafactor", "type"),
        "beta2_decay": (params.beta2_decay, "params.beta2_decay"),
        "eps2": (least_scale, "params.eps"),
        "d": (params.d, "params.d"),
        "weight_decay": (params.weight_decay, "params.weight_decay"),
    }
    if least is not None:
        options["eps"] = (least, "params.eps")
    return options


def _validated(model: type[_Params], kind: str, params: Mapping[str, object]) -> _Params:
    """The parameters; no refused one asks for anything."""
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
