"""Element-wise optimizers over flat shards: torch's fused kernels, and Lion, which torch does not have.

One call updates the elements of one group in a region, piece by piece. torch's kernels divide the gradient by their
argument ``grad_scale``, so unscaling, averaging over ranks and clipping need no pass of their own; they also store
the divided gradient. Where ``found_inf`` is 1 they change nothing. Optimizers that work on whole parameters have their
element-wise half here, and the other half in ``whole_steps``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from zeroir.ir.ops import Algorithm
from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Tensors of one update on one rank.

    ``params``, ``grads`` and each of ``states`` are pieces, flat f32, of which those at one index have one length.
    ``step``, ``divisor`` and ``skip`` are f32[1] and ``lr`` f64[1] on their device; ``hyper`` is f64 on the host.
    ``padding`` are the parts of the flat that belong to no parameter.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    step: Tensor
    lr: Tensor
    hyper: Tensor
    divisor: Tensor
    skip: Tensor | None
    padding: Sequence[Tensor] = ()


def update(algorithm: Algorithm, operands: Operands) -> None:
    """Update ``param`` and ``states`` in place, as torch.optim's fused implementation of the algorithm does."""
    match algorithm:
        case Algorithm.SGD | Algorithm.MOMENTUM:
            _sgd(operands)
        case Algorithm.ADAM:
            _adam(torch.ops.aten._fused_adam_.tensor_lr, operands)
        case Algorithm.ADAMW:
            _adam(torch.ops.aten._fused_adamw_.tensor_lr, operands)
        case Algorithm.LION:
            _lion(operands)
        case Algorithm.MUON | Algorithm.ADAFACTOR | Algorithm.SHAMPOO:
            raise ValueError(f"{algorithm} works on whole parameters")
        case _:
            assert_never(algorithm)


def compute_directions(algorithm: Algorithm, operands: Operands) -> None:
    """Carry out ``ops.Direction``; ``params`` are the directions, of the dtype that the algorithm gives them."""
    if algorithm is Algorithm.MUON:
        _momentum(operands)
        return
    for direction, grad in zip(operands.params, operands.grads, strict=True):
        direction.copy_(grad.div_(operands.divisor))


def _momentum(operands: Operands) -> None:
    """Muon's momentum, as torch.optim.Muon computes it, chunk by chunk."""
    momentum, nesterov, *_ = operands.hyper.tolist()
    (buffers,) = operands.states
    is_skipped = None if operands.skip is None else operands.skip > 0
    most = max((grad.numel() for grad in operands.grads), default=0)
    scratch = operands.divisor.new_empty(
        min(most, STEPPED_CHUNK_NUMEL) if operands.skip is not None else 0
    )
    for pieces in zip(operands.params, operands.grads, buffers, strict=True):
        for direction, grad, buffer in _chunks(pieces):
            grad.div_(operands.divisor)
            if is_skipped is None:
                buffer.lerp_(grad, 1 - momentum)
            else:
                moved = torch.lerp(buffer, grad, 1 - momentum, out=scratch[: grad.numel()])
                torch.where(is_skipped, buffer, moved, out=buffer)
            direction.copy_(grad.lerp_(buffer, momentum) if nesterov else buffer)


def _chunks(pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The elements at one place in each of several flat tensors of one length, chunk by chunk."""
    for start in range(0, pieces[0].numel(), STEPPED_CHUNK_NUMEL):
        yield tuple(piece[start : start + STEPPED_CHUNK_NUMEL] for piece in pieces)


def _sgd(operands: Operands) -> None:
    momentum, dampening, nesterov, weight_decay = operands.hyper.tolist()
    # Without momentum there is no state, as in torch.optim; CUDA's kernel would refuse one.
    states = operands.states[0] if momentum and operands.states else ()
    # The first step takes the gradient itself as momentum. A buffer of zeros gives the same without dampening, so only
    # with dampening must the host read the step count from the device.
    is_first_step = bool(states) and dampening != 0.0 and operands.step.item() == 1.0
    torch.ops.aten._fused_sgd_.tensor_lr(
        operands.params,
        operands.grads,
        states,
        weight_decay=weight_decay,
        momentum=momentum if states else 0.0,
        lr=_learning_rate(operands),
        dampening=dampening,
        nesterov=bool(nesterov),
        maximize=False,
        is_first_step=is_first_step,
        grad_scale=operands.divisor,
        found_inf=operands.skip,
    )


def _adam(kernel: torch._ops.OpOverload, operands: Operands) -> None:
    beta1, beta2, eps, weight_decay = operands.hyper.tolist()
    exp_avgs, exp_avg_sqs = operands.states
    kernel(
        operands.params,
        operands.grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [operands.step] * len(operands.params),
        lr=_learning_rate(operands),
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


def _lion(operands: Operands) -> None:
    """Algorithm 2 of Chen et al. 2023 (arXiv 2302.06675), chunk by chunk; each operation rounds by itself."""
    beta1, beta2, weight_decay = operands.hyper.tolist()
    lr = operands.lr.to(torch.float32)
    kept = (1 - operands.lr * weight_decay).to(torch.float32)
    is_skipped = None if operands.skip is None else operands.skip > 0
    (averages,) = operands.states
    most = max((param.numel() for param in operands.params), default=0)
    scratch = lr.new_empty(2, min(most, STEPPED_CHUNK_NUMEL))
    for pieces in zip(operands.params, operands.grads, averages, strict=True):
        for param, grad, average in _chunks(pieces):
            update, other = scratch[:, : param.numel()]
            grad.div_(operands.divisor)
            torch.mul(average, beta1, out=update).add_(torch.mul(grad, 1 - beta1, out=other))
            update.sign_().mul_(lr)
            torch.mul(param, kept, out=other).sub_(update)
            _replace(param, other, is_skipped)
            torch.mul(average, beta2, out=update).add_(torch.mul(grad, 1 - beta2, out=other))
            _replace(average, update, is_skipped)


def _replace(old: Tensor, new: Tensor, is_skipped: Tensor | None) -> None:
    if is_skipped is None:
        old.copy_(new)
    else:
        torch.where(is_skipped, old, new, out=old)


def _learning_rate(operands: Operands) -> Tensor:
    """The learning rate as the kernels read it: any float on the host, FP32 on a CUDA device."""
    return operands.lr if operands.lr.device.type == "cpu" else operands.lr.to(torch.float32)
