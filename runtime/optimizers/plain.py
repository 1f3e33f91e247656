"""Optimizers as plain PyTorch has them: the reference for the updates of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class PlainOptimizer(Protocol):
    """What is used of a ``torch.optim.Optimizer``."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The states of each parameter by name."""

    def step(self) -> object:
        """Update every parameter with its gradient."""


MakePlain = Callable[[Sequence[Tensor], Mapping[str, Any]], PlainOptimizer]
"""An optimizer of these parameters from the settings under torch's keys, with ``lr``."""
