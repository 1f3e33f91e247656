"""Shampoo in plain torch: algorithm 1 of Gupta et al. 2018 (arXiv 1802.09568), with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Shampoo:
    """Steps like a torch.optim optimizer. ``eps`` is added to the eigenvalues of sums that begin with zeros."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, eps: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.eps = eps
        self.weight_decay = weight_decay
        self.state = {
            p: [torch.zeros(size, size, dtype=p.dtype) for size in p.shape] for p in self.parameters
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with its gradient."""
        lr = self.param_groups[0]["lr"]
        for parameter in self.parameters:
            gradient, (left, right) = parameter.grad, self.state[parameter]
            assert gradient is not None
            left.add_(gradient @ gradient.T)
            right.add_(gradient.T @ gradient)
            update = self._root(left) @ gradient @ self._root(right)
            parameter.mul_(1 - lr * self.weight_decay)
            parameter.add_(update, alpha=-lr)

    def _root(self, matrix: Tensor) -> Tensor:
        values: Tensor
        vectors: Tensor
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * (values.clamp(min=0) + self.eps).pow(-0.25)) @ vectors.T
