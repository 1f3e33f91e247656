"""Lion: algorithm 2 of Chen et al. 2023 (arXiv 2302.06675), with the paper's defaults, but without weight decay."""

from __future__ import annotations

from typing import Final

from zeroir.ir.optimizers.declaration import Declaration, ElementState
from zeroir.ir.optimizers.settings import betas, weight_decay

LION: Final = Declaration(
    title="Lion",
    settings=(*betas(0.9, 0.99, "exp_avg"), weight_decay(0.0)),
    states=(ElementState(name="exp_avg"),),
)
