"""Optimizers of plain PyTorch: the reference for the updates of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class PlainOptimizer(Protocol):
    """The part of ``torch.optim.Optimizer`` that is used."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The states of each parameter by name."""

    def step(self) -> object:
        """Update every parameter with its gradient."""


MakePlain = Callable[[Sequence[Tensor], Mapping[str, Any]], PlainOptimizer]
"""A function that creates an optimizer of these parameters from settings under torch's keys, with ``lr``."""
