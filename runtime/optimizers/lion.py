"""Lion, which torch does not have: algorithm 2 of Chen et al. 2023 (arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroir.runtime.optimizers.arithmetic import chunks, overwrite, skipped
from zeroir.runtime.optimizers.operands import Operands
from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL


def update(operands: Operands) -> None:
    """Update parameters and averages, chunk by chunk; each operation rounds by itself."""
    beta1, beta2, weight_decay = operands.hyper.tolist()
    lr = operands.lr.to(torch.float32)
    kept = (1 - operands.lr * weight_decay).to(torch.float32)
    is_skipped = skipped(operands.skip)
    (averages,) = operands.states
    most = max((param.numel() for param in operands.params), default=0)
    scratch = lr.new_empty(2, min(most, STEPPED_CHUNK_NUMEL))
    for pieces in zip(operands.params, operands.grads, averages, strict=True):
        for param, grad, average in chunks(pieces):
            step, other = scratch[:, : param.numel()]
            grad.div_(operands.divisor)
            torch.mul(average, beta1, out=step).add_(torch.mul(grad, 1 - beta1, out=other))
            step.sign_().mul_(lr)
            torch.mul(param, kept, out=other).sub_(step)
            overwrite(param, other, is_skipped)
            torch.mul(average, beta2, out=step).add_(torch.mul(grad, 1 - beta2, out=other))
            overwrite(average, step, is_skipped)


class PlainLion:
    """The reference in plain torch, which steps like a ``torch.optim.Optimizer``; every operation rounds by itself."""

    def __init__(self, parameters: Sequence[Tensor], settings: Mapping[str, Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **settings}]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {"exp_avg": torch.zeros_like(parameter)} for parameter in parameters
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with its gradient."""
        (group,) = self.param_groups
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        for parameter in group["params"]:
            average, gradient = self.state[parameter]["exp_avg"], parameter.grad
            sign = (beta1 * average + (1 - beta1) * gradient).sign()
            parameter.copy_((1 - lr * decay) * parameter - lr * sign)
            average.copy_(beta2 * average + (1 - beta2) * gradient)
