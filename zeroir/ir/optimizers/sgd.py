"""Stochastic gradient descent, without and with momentum, as ``torch.optim.SGD`` has it."""

from __future__ import annotations

from typing import Final

from zeroir.ir.optimizers.declaration import Declaration, ElementState
from zeroir.ir.optimizers.settings import (
    NOT_NEGATIVE,
    Setting,
    momentum,
    nesterov,
    nesterov_problem,
    weight_decay,
)

_WITHOUT: Final = "the program was compiled without momentum"

SGD: Final = Declaration(
    title="SGD",
    settings=(
        Setting(name="momentum", default=0.0, fixed=_WITHOUT),
        Setting(name="dampening", default=0.0, fixed=_WITHOUT),
        Setting(name="nesterov", default=False, fixed=_WITHOUT),
        weight_decay(0.0),
    ),
    torch_class="SGD",
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
    torch_class="SGD",
    problem=nesterov_problem,
)
