"""Modules under ``DistributedDataParallel``, which live until their process ends."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated(module: nn.Module) -> DistributedDataParallel:
    """Replicate a module over all ranks.

    Freed before the process ends, it may hang: its reducer frees the process group while it holds the GIL, and joins a
    thread of gloo that waits for the GIL to free the last collective's tensors.
    """
    _KEPT.append(DistributedDataParallel(module))
    return _KEPT[-1]


_KEPT: list[DistributedDataParallel] = []
