"""SGD with torch's fused kernel."""

from __future__ import annotations

import torch

from zeroir.runtime.optimizers.arithmetic import learning_rate
from zeroir.runtime.optimizers.operands import Operands


def update(operands: Operands) -> None:
    """Update parameters and momentum."""
    momentum, dampening, nesterov, weight_decay = operands.hyper.tolist()
    # Without momentum there is no state, as in torch.optim; CUDA's kernel would reject one.
    states = operands.states[0] if momentum and operands.states else ()
    # The first step uses the gradient itself as momentum. A buffer of zeros gives the same without dampening, so only
    # with dampening must the host read the step count from the device.
    is_first_step = bool(states) and dampening != 0.0 and operands.step.item() == 1.0
    torch.ops.aten._fused_sgd_.tensor_lr(
        operands.params,
        operands.grads,
        states,
        weight_decay=weight_decay,
        momentum=momentum if states else 0.0,
        lr=learning_rate(operands.lr),
        dampening=dampening,
        nesterov=bool(nesterov),
        maximize=False,
        is_first_step=is_first_step,
        grad_scale=operands.divisor,
        found_inf=operands.skip,
    )
