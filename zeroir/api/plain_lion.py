"""Lion in plain torch: algorithm 2 of Chen et al. 2023 (arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion:
    """Steps like a torch.optim optimizer; every operation rounds by itself."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "betas": betas}]
        self.decay = decay
        self.state = {p: {"exp_avg": torch.zeros_like(p)} for p in self.parameters}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with its gradient."""
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.param_groups[0]["betas"]
        for parameter in self.parameters:
            average, gradient = self.state[parameter]["exp_avg"], parameter.grad
            assert gradient is not None
            update = (beta1 * average + (1 - beta1) * gradient).sign()
            parameter.copy_((1 - lr * self.decay) * parameter - lr * update)
            average.copy_(beta2 * average + (1 - beta2) * gradient)
