"""Shampoo, which torch does not have: algorithm 1 of Gupta et al. 2018 (arXiv 1802.09568), decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroir.runtime.optimizers.arithmetic import number, skipped
from zeroir.runtime.optimizers.operands import WholeOperands


def step(operands: WholeOperands) -> None:
    """Update matrices from their gradients, and the sums of products."""
    eps, weight_decay = operands.hyper.tolist()
    lr, is_skipped = number(operands.lr), skipped(operands.skip)
    for parameter in operands.parameters:
        gradient, (rows, columns) = parameter.direction, parameter.kept
        moved = [rows.whole + gradient @ gradient.T, columns.whole + gradient.T @ gradient]
        if is_skipped is not None:
            # A gradient with infinities has no roots.
            moved = [
                torch.where(is_skipped, sums.whole, new)
                for sums, new in zip(parameter.kept, moved, strict=True)
            ]
        for sums, new in zip(parameter.kept, moved, strict=True):
            sums.move(new)
        if parameter.param.numel():
            left, right = (inverse_fourth_root(matrix, eps) for matrix in moved)
            update = left @ gradient @ right
            parameter.apply(update, 1 - lr * weight_decay, lr, is_skipped)


def inverse_fourth_root(matrix: Tensor, eps: float) -> Tensor:
    """Return the power −1/4 of a symmetric matrix plus ``eps`` × identity.

    Negative eigenvalues are noise and become 0.
    """
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_(min=0).add_(eps).pow_(-0.25)) @ vectors.T


class PlainShampoo:
    """The reference in plain torch, which steps like a ``torch.optim.Optimizer``."""

    def __init__(self, parameters: Sequence[Tensor], settings: Mapping[str, Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **settings}]
        self.state: dict[Tensor, list[Tensor]] = {
            p: [torch.zeros(size, size, dtype=p.dtype) for size in p.shape] for p in parameters
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with its gradient."""
        (group,) = self.param_groups
        lr, eps = group["lr"], group["eps"]
        for parameter in group["params"]:
            gradient, (left, right) = parameter.grad, self.state[parameter]
            left.add_(gradient @ gradient.T)
            right.add_(gradient.T @ gradient)
            update = _plain_root(left, eps) @ gradient @ _plain_root(right, eps)
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(update, alpha=-lr)


def _plain_root(matrix: Tensor, eps: float) -> Tensor:
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + eps).pow(-0.25)) @ vectors.T
