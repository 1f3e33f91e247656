"""Muon, as in torch.optim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from zeroir.runtime.optimizers.arithmetic import chunks, number, overwrite, skipped
from zeroir.runtime.optimizers.operands import Operands, WholeOperands
from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL

_RMS_ADAMW: Final = 0.2
"""The root mean square of AdamW's updates, which ``match_rms_adamw`` aims at (Liu et al. 2025, arXiv 2502.16982)."""


def directions(operands: Operands) -> None:
    """Update the momentum, chunk by chunk, and write it to the directions, with Nesterov's gradient term if enabled."""
    momentum, nesterov, *_ = operands.hyper.tolist()
    (buffers,) = operands.states
    is_skipped = skipped(operands.skip)
    most = max((grad.numel() for grad in operands.grads), default=0)
    scratch = operands.divisor.new_empty(
        min(most, STEPPED_CHUNK_NUMEL) if operands.skip is not None else 0
    )
    for pieces in zip(operands.params, operands.grads, buffers, strict=True):
        for direction, grad, buffer in chunks(pieces):
            grad.div_(operands.divisor)
            if is_skipped is None:
                buffer.lerp_(grad, 1 - momentum)
            else:
                moved = torch.lerp(buffer, grad, 1 - momentum, out=scratch[: grad.numel()])
                overwrite(buffer, moved, is_skipped)
            direction.copy_(grad.lerp_(buffer, momentum) if nesterov else buffer)


def step(operands: WholeOperands) -> None:
    """Update matrices by their directions, with singular values near 1."""
    _, _, weight_decay, eps, ns_steps, *coefficients, adjustment = operands.hyper.tolist()
    lr, is_skipped = number(operands.lr), skipped(operands.skip)
    for parameter in operands.parameters:
        matrix = parameter.direction
        orthogonalise(matrix, coefficients, int(ns_steps), eps)
        rows, columns = matrix.shape
        ratio = math.sqrt(max(1, rows / columns))
        if adjustment:
            ratio = _RMS_ADAMW * math.sqrt(max(rows, columns))
        parameter.apply(matrix, 1 - lr * weight_decay, lr * ratio, is_skipped)


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> None:
    """Replace a BF16 matrix by its Newton-Schulz iteration: singular values approach 1, singular vectors are kept.

    The operations are those of torch.optim.Muon, in its order and on tensors of its layout.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
        del gram, update
    if steps:
        matrix.copy_(x.T if is_tall else x)
