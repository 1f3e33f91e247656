"""DeepSpeed's block ``optimizer`` as options.

Sources: ``DeepSpeedEngine._configure_basic_optimizer``, ``ops/adam/fused_adam.py`` of DeepSpeed 0.19.6, and
``torch.optim``, from which DeepSpeed takes every optimizer that it has not itself. A type is compared without case
where DeepSpeed has it itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroir.errors import UserError

Rate = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerParams(BaseModel):
    """``optimizer.params``; a default is that of DeepSpeed's constructor."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: Rate = 1e-3
    maximize: Literal[False] = False
    # These choose among implementations of equal results.
    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False
    differentiable: Literal[False] = False


class AdamParams(OptimizerParams):
    """Of ``Adam`` and ``AdamW``."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate | None = None
    bias_correction: Literal[True] = True
    amsgrad: Literal[False] = False
    adam_w_mode: bool = True
    torch_adam: bool = False
    set_grad_none: bool = True
    fp32_optimizer_states: Literal[True] = True


class SGDParams(OptimizerParams):
    """Of ``SGD``."""

    momentum: Beta = 0.0
    dampening: Rate = 0.0
    weight_decay: Rate = 0.0
    nesterov: bool = False


_Params = TypeVar("_Params", bound=OptimizerParams)


def optimizer_options(kind: str, params: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Options by name, each with the key of ``optimizer`` that it comes from.

    Raises:
        UserError: where zeroir lacks the optimizer, or a parameter of it; it is named.
    """
    if "max_grad_norm" in params:
        raise UserError(
            "optimizer.params.max_grad_norm cannot be honoured: DeepSpeed refuses it, too; use gradient_clipping."
        )
    if kind.lower() in ("adam", "adamw"):
        return _adam(kind.lower(), _validated(AdamParams, kind, params))
    if kind == "SGD":
        return _sgd(_validated(SGDParams, kind, params))
    raise UserError(
        f"optimizer.type cannot be honoured: zeroir has no optimizer {kind}; it has Adam, AdamW and SGD."
    )


def _adam(kind: str, params: AdamParams) -> dict[str, tuple[object, str]]:
    is_adamw = kind == "adamw" or params.adam_w_mode
    # FusedAdam decays nothing by default; torch's AdamW does.
    default_decay = 0.01 if params.torch_adam and is_adamw else 0.0
    is_given = params.weight_decay is not None
    return {
        "optimizer": ("adamw" if is_adamw else "adam", "optimizer.type"),
        "lr": (params.lr, "optimizer.params.lr"),
        "beta1": (params.betas[0], "optimizer.params.betas"),
        "beta2": (params.betas[1], "optimizer.params.betas"),
        "eps": (params.eps, "optimizer.params.eps"),
        "weight_decay": (
            params.weight_decay if is_given else default_decay,
            "optimizer.params.weight_decay",
        ),
    }


def _sgd(params: SGDParams) -> dict[str, tuple[object, str]]:
    options: dict[str, tuple[object, str]] = {
        "optimizer": ("momentum" if params.momentum else "sgd", "optimizer.type"),
        "lr": (params.lr, "optimizer.params.lr"),
        "weight_decay": (params.weight_decay, "optimizer.params.weight_decay"),
    }
    if params.momentum:
        options["momentum"] = (params.momentum, "optimizer.params.momentum")
        options["dampening"] = (params.dampening, "optimizer.params.dampening")
        options["nesterov"] = (params.nesterov, "optimizer.params.nesterov")
    elif params.nesterov:
        raise UserError("optimizer.params.nesterov needs a momentum above 0.")
    return options


IMPLEMENTATION_PARAMS: Final = {
    "foreach",
    "fused",
    "capturable",
    "torch_adam",
    "set_grad_none",
    "fp32_optimizer_states",
}
"""Parameters that choose among implementations of equal results, so that they have no meaning here."""


def _validated(model: type[_Params], kind: str, params: Mapping[str, object]) -> _Params:
    for key in params:
        if key not in model.model_fields:
            nearest = difflib.get_close_matches(key, model.model_fields, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "."
            raise UserError(f"{kind} has no parameter optimizer.params.{key}{hint}")
    try:
        return model.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(
            f"optimizer.params.{key} is {first['input']!r}, but zeroir's {kind} has only {expected}."
            if first["type"] == "literal_error"
            else f"optimizer.params.{key} is {first['input']!r}, but should be {expected}."
        ) from None
