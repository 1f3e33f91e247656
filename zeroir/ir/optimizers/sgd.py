"""Stochastic gradient descent, without and with momentum, as in ``torch.optim.SGD``."""

from __future__ import annotations

from typing import Final

from zeroir.errors import UserError
from zeroir.ir.optimizers.declaration import Declaration, ElementState, Numbers
from zeroir.ir.optimizers.elsewhere import InDeepSpeed, InTorch, Values
from zeroir.ir.optimizers.settings import (
    NOT_NEGATIVE,
    Setting,
    momentum,
    nesterov,
    nesterov_problem,
    weight_decay,
)

_WITHOUT: Final = "the program was compiled without momentum"


def _first_step(hyper: Numbers) -> str | None:
    """Return why the host needs the step count: the first step uses the gradient itself as momentum."""
    if hyper["momentum"] and hyper["dampening"]:
        return "momentum with dampening asks the device for the step count"
    return None


def _deepspeeds(_type: str, keys: Values) -> str:
    return "momentum" if keys.get("momentum") else "sgd"


def _settings_of_deepspeed(_type: str, keys: Values, settings: Values) -> Values:
    if keys["momentum"]:
        return settings
    if keys["nesterov"]:
        raise UserError("optimizer.params.nesterov needs a momentum above 0.")
    return {"weight_decay": settings["weight_decay"]}


SGD: Final = Declaration(
    title="SGD",
    settings=(
        Setting(name="momentum", default=0.0, fixed=_WITHOUT),
        Setting(name="dampening", default=0.0, fixed=_WITHOUT),
        Setting(name="nesterov", default=False, fixed=_WITHOUT),
        weight_decay(0.0),
    ),
    torch=InTorch(class_name="SGD", fixed={"momentum": 0.0}),
    marks=("momentum", "dampening"),
)

MOMENTUM: Final = Declaration(
    title="SGD with momentum",
    settings=(
        momentum(0.9),
        Setting(name="dampening", default=0.0, effect="dampening", limits=NOT_NEGATIVE),
        nesterov(False),
        weight_decay(0.0),
    ),
    states=(ElementState(name="momentum_buffer"),),
    torch=InTorch(class_name="SGD"),
    deepspeed=InDeepSpeed(
        types=("SGD",),
        is_from_torch=True,
        defaults={"momentum": 0.0},
        reasons={"momentum": "above 0 it makes `optimizer` momentum"},
        optimizer=_deepspeeds,
        settings=_settings_of_deepspeed,
    ),
    marks=("momentum",),
    problem=nesterov_problem,
    waits=_first_step,
)
