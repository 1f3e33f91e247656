"""Lion: algorithm 2 of Chen et al. 2023 (arXiv 2302.06675), with the paper's defaults, but without weight decay."""

from __future__ import annotations

from typing import Final

from zeroir.ir.optimizers.declaration import Declaration, ElementState
from zeroir.ir.optimizers.elsewhere import InDeepSpeed
from zeroir.ir.optimizers.settings import betas, weight_decay

LION: Final = Declaration(
    title="Lion",
    definition="algorithm 2 of Chen et al. 2023 ([arXiv 2302.06675](https://arxiv.org/abs/2302.06675))",
    settings=(*betas(0.9, 0.99, "exp_avg"), weight_decay(0.0)),
    states=(ElementState(name="exp_avg"),),
    scratch_numbers=2,
    deepspeed=InDeepSpeed(types=("Lion",), is_from_torch=False, defaults={"betas": (0.9, 0.999)}),
    marks=("betas",),
)
