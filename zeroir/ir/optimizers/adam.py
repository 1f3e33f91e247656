"""Adam and AdamW, as ``torch.optim`` has them."""

from __future__ import annotations

from typing import Final

from zeroir.ir.optimizers.declaration import Declaration, ElementState
from zeroir.ir.optimizers.settings import NOT_NEGATIVE, Setting, betas, weight_decay

_SETTINGS: Final = (
    *betas(0.9, 0.999, "exp_avg_sq"),
    Setting(
        name="eps", default=1e-8, effect="number added to the denominator", limits=NOT_NEGATIVE
    ),
)
_STATES: Final = (ElementState(name="exp_avg"), ElementState(name="exp_avg_sq", is_signed=False))

ADAM: Final = Declaration(
    title="Adam",
    settings=(*_SETTINGS, weight_decay(0.0)),
    states=_STATES,
    torch_class="Adam",
    counts_steps=True,
)

ADAMW: Final = Declaration(
    title="AdamW",
    settings=(*_SETTINGS, weight_decay(0.01)),
    states=_STATES,
    torch_class="AdamW",
    counts_steps=True,
)
