"""Element-wise optimizers over flat shards: torch's fused kernels, which divide the gradient and honour a skip.

One call updates one region. ``grad_scale`` is the kernels' name for what they divide the gradient by, so unscaling,
averaging over ranks and clipping cost no pass of their own; the kernels also store the divided gradient back. Where
``found_inf`` is 1 they touch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from zeroir.ir.ops import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Tensors of one update on one rank.

    ``param``, ``grad`` and ``states`` are flat f32 of one length; ``step``, ``divisor`` and ``skip`` f32[1] and ``lr``
    f64[1] on their device; ``hyper`` four f64 on the host. ``padding`` are the parts of ``param`` that belong to no
    parameter.
    """

    param: Tensor
    grad: Tensor
    states: Sequence[Tensor]
    step: Tensor
    lr: Tensor
    hyper: Tensor
    divisor: Tensor
    skip: Tensor | None
    padding: Sequence[Tensor] = ()


def update(algorithm: Algorithm, x: Operands) -> None:
    """Update ``param`` and ``states`` in place, as torch.optim's fused implementation of the algorithm does."""
    match algorithm:
        case Algorithm.SGD | Algorithm.MOMENTUM:
            _sgd(x)
        case Algorithm.ADAM:
            _adam(torch.ops.aten._fused_adam_.tensor_lr, x)
        case Algorithm.ADAMW:
            _adam(torch.ops.aten._fused_adamw_.tensor_lr, x)
        case _:
            assert_never(algorithm)


def _sgd(x: Operands) -> None:
    momentum, dampening, nesterov, weight_decay = x.hyper.tolist()
    # Without momentum there is none to keep, as torch.optim has it; CUDA's kernel refuses it.
    states = x.states if momentum else ()
    # The first step takes the gradient itself as momentum; a buffer of zeros gives the same unless it is dampened,
    # and only then is it worth asking the device for the step.
    is_first_step = bool(states) and dampening != 0.0 and x.step.item() == 1.0
    torch.ops.aten._fused_sgd_.tensor_lr(
        [x.param],
        [x.grad],
        list(states),
        weight_decay=weight_decay,
        momentum=momentum if states else 0.0,
        lr=_learning_rate(x),
        dampening=dampening,
        nesterov=bool(nesterov),
        maximize=False,
        is_first_step=is_first_step,
        grad_scale=x.divisor,
        found_inf=x.skip,
    )


def _adam(kernel: torch._ops.OpOverload, x: Operands) -> None:
    beta1, beta2, eps, weight_decay = x.hyper.tolist()
    exp_avg, exp_avg_sq = x.states
    kernel(
        [x.param],
        [x.grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [x.step],
        lr=_learning_rate(x),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=x.divisor,
        found_inf=x.skip,
    )
    if eps == 0.0:
        # Where gradients have always been zero an update without eps is 0 / 0.
        for piece in x.padding:
            piece.zero_()


def _learning_rate(x: Operands) -> Tensor:
    """The learning rate as the kernels read it: any float from the host, FP32 on a CUDA device."""
    return x.lr if x.lr.device.type == "cpu" else x.lr.to(torch.float32)
