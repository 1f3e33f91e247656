"""Transfer of torch schedulers from a user's optimizer to that of an engine."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroir.errors import UserError

_FIRST_LR = "initial_lr"
"""The key with which torch marks the groups of an optimizer that has a scheduler."""


def without_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Remove empty groups and the marks of a scheduler from an optimizer, since it will drive the engine's."""
    groups = [g for g in optimizer.param_groups if any(p.requires_grad for p in g["params"])]
    optimizer.param_groups[:] = groups
    for group in groups:
        group.pop(_FIRST_LR, None)
    return optimizer


def move_scheduler(
    scheduler: object, old: torch.optim.Optimizer | None, new: torch.optim.Optimizer
) -> None:
    """Make a scheduler of the optimizer ``old`` drive the engine's, including those that it consists of.

    Raises:
        UserError: if it was made for groups that the engine lacks, because nothing in them is trained.
    """
    if not isinstance(scheduler, LRScheduler) or old is None or old is new:
        return
    # A scheduler counts the steps of its optimizer, for which torch replaces the optimizer's method ``step``.
    LambdaLR(new, lambda _: 1.0)
    for own, theirs in zip(new.param_groups, old.param_groups, strict=False):
        for key, setting in theirs.items():  # Cyclic schedules store their bounds there.
            own.setdefault(key, setting)
    _attach(scheduler, new)


def _attach(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    for part in getattr(scheduler, "_schedulers", ()):
        _attach(part, optimizer)
    first_lrs = getattr(scheduler, "base_lrs", None)
    if first_lrs is not None:
        if len(first_lrs) != len(optimizer.param_groups):
            raise UserError(
                f"The scheduler was made for {len(first_lrs)} groups of the optimizer, but parameters of "
                f"{len(optimizer.param_groups)} are trained: leave groups without trained parameters out."
            )
        for group, first_lr in zip(optimizer.param_groups, first_lrs, strict=True):
            group[_FIRST_LR] = first_lr
    scheduler.optimizer = optimizer
