"""Adam and AdamW with torch's fused kernels."""

from __future__ import annotations

import torch

from zeroir.runtime.optimizers.arithmetic import learning_rate
from zeroir.runtime.optimizers.operands import Operands


def adam(operands: Operands) -> None:
    """Update parameters and moments, with the weight decay as part of the gradient."""
    _update(torch.ops.aten._fused_adam_.tensor_lr, operands)


def adamw(operands: Operands) -> None:
    """Update parameters and moments, with decoupled weight decay."""
    _update(torch.ops.aten._fused_adamw_.tensor_lr, operands)


def _update(kernel: torch._ops.OpOverload, operands: Operands) -> None:
    beta1, beta2, eps, weight_decay = operands.hyper.tolist()
    exp_avgs, exp_avg_sqs = operands.states
    kernel(
        operands.params,
        operands.grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [operands.step] * len(operands.params),
        lr=learning_rate(operands.lr),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=operands.divisor,
        found_inf=operands.skip,
    )
    if eps == 0.0:
        # Without eps the update of an element whose gradients were always zero is 0 / 0.
        for padding in operands.padding:
            padding.zero_()
