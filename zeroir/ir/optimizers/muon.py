"""Muon, as ``torch.optim`` has it: the momentum of a matrix with its singular values near 1."""

from __future__ import annotations

from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.declaration import Declaration, ElementState, WholeStep
from zeroir.ir.optimizers.settings import (
    NOT_NEGATIVE,
    Limits,
    Setting,
    momentum,
    nesterov,
    nesterov_problem,
    weight_decay,
)

MUON: Final = Declaration(
    title="Muon",
    settings=(
        momentum(0.95),
        nesterov(True),
        weight_decay(0.1),
        Setting(name="eps", default=1e-7, effect="least denominator", limits=NOT_NEGATIVE),
        Setting(
            name="ns_steps",
            default=5,
            effect="Newton-Schulz iterations",
            limits=Limits(at_least=1, below=100),
        ),
        Setting(
            name="ns_coefficients",
            default=(3.4445, -4.7750, 2.0315),
            effect="coefficients of a Newton-Schulz iteration",
        ),
        Setting(
            name="adjust_lr_fn",
            default="original",
            effect="how the learning rate depends on the shape of a parameter",
            choices=("original", "match_rms_adamw"),
        ),
    ),
    states=(ElementState(name="momentum_buffer"),),
    # The iteration begins by rounding to BF16, so no more is gathered.
    whole=WholeStep(direction_dtype=DType.BF16, takes_matrices_alone=True),
    torch_class="Muon",
    problem=nesterov_problem,
)
