"""Muon, as in ``torch.optim``: the momentum of a matrix with its singular values near 1."""

from __future__ import annotations

from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.declaration import (
    Declaration,
    ElementState,
    Numbers,
    Shape,
    StepScratch,
    WholeStep,
)
from zeroir.ir.optimizers.elsewhere import InTorch
from zeroir.ir.optimizers.settings import (
    NOT_NEGATIVE,
    Limits,
    Setting,
    momentum,
    nesterov,
    nesterov_problem,
    weight_decay,
)


def _scratch(shape: Shape) -> StepScratch:
    """Return scratch memory for two iterates of Newton-Schulz and two products of their smaller side, in BF16."""
    short, long = min(shape), max(shape)
    own_bytes = DType.BF16.itemsize_bytes * (2 * short * long + 2 * short * short)
    return StepScratch(own_bytes=own_bytes, product=(short, short, long))


def _flops(shape: Shape, hyper: Numbers) -> int:
    """Return the FLOPs of each iteration: a product with its transpose, the square of that, and a product of both."""
    short, long = min(shape), max(shape)
    return int(hyper["ns_steps"]) * (4 * short * short * long + 2 * short**3)


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
    # The iteration starts by rounding to BF16, so BF16 directions are enough.
    whole=WholeStep(
        direction_dtype=DType.BF16,
        scratch=_scratch,
        flops=_flops,
        takes_matrices_alone=True,
    ),
    torch=InTorch(class_name="Muon"),
    not_from_deepspeed="DeepSpeed's Muon updates embeddings and the head by an Adam of its own settings; write "
    "--optimizer muon and --group beside a file without this block",
    marks=("momentum", "ns_steps"),
    problem=nesterov_problem,
)
