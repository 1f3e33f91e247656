"""Adafactor, as in torch.optim."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroir.runtime.optimizers.arithmetic import (
    Number,
    largest,
    least,
    norm,
    number,
    skipped,
)
from zeroir.runtime.optimizers.operands import KeptPart, WholeOperands, WholeParameter


def step(operands: WholeOperands) -> None:
    """Update parameters of any shape from their gradients, and their factored second moments."""
    beta2_decay, eps1, eps2, most, weight_decay = operands.hyper.tolist()
    # Before the first step that is not skipped the count is 0, and the result is never used.
    lr, count = number(operands.lr), largest(number(operands.step), 1.0)
    weight = count**beta2_decay
    rate = least(lr, 1 / count**0.5)
    is_skipped = skipped(operands.skip)
    for parameter in operands.parameters:
        gradient, whole = parameter.direction, parameter.whole
        assert whole is not None
        size = largest(norm(whole) / whole.numel() ** 0.5, eps2) * rate
        variance = _variance(parameter, weight, eps1, is_skipped)
        if variance is None:
            continue
        update = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient)
        length = largest(norm(update) / (update.numel() ** 0.5 * most), 1.0)
        parameter.apply(update, 1 - lr * weight_decay, size / length, is_skipped)


def _variance(
    parameter: WholeParameter, weight: Number, eps1: float, is_skipped: Tensor | None
) -> Tensor | None:
    """Update the second moments, and return those of the elements; None where this rank updates none."""
    gradient = parameter.direction
    if len(parameter.kept) == 1:
        (moments,) = parameter.kept
        _move(moments, gradient * gradient, weight, is_skipped)
        return moments.whole.clone() if parameter.param.numel() else None
    rows, columns = parameter.kept
    for moments, dim in ((rows, -1), (columns, -2)):
        means = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
        _move(moments, means.square_().div_(gradient.size(dim)), weight, is_skipped)
    if not parameter.param.numel():
        return None
    mean = rows.whole.mean(dim=-2, keepdim=True)
    return (rows.whole @ columns.whole).div_(mean.clamp_(min=eps1))


def _move(moments: KeptPart, new: Tensor, weight: Number, is_skipped: Tensor | None) -> None:
    if isinstance(weight, Tensor):
        moved = torch.lerp(moments.whole, new, weight.to(new.dtype))
    else:
        moved = torch.lerp(moments.whole, new, weight)
    moments.move(moved, is_skipped)
