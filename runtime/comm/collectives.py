"""Torch's collectives on flat tensors, whose names differ between the versions of torch that zeroir supports.

torch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` and warns of the old names; torch 2.11 has
only the old ones.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _FlatAllGather(Protocol):
    def __call__(self, output: Tensor, source: Tensor, /, *, group: ProcessGroup) -> object:
        """Fill ``output`` from every rank's ``source``."""


class _FlatReduceScatter(Protocol):
    def __call__(
        self, output: Tensor, source: Tensor, /, *, op: dist.ReduceOp.RedOpType, group: ProcessGroup
    ) -> object:
        """Fill ``output`` from every rank's ``source``."""


_all_gather: _FlatAllGather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: _FlatReduceScatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_flat(destination: Tensor, source: Tensor, group: ProcessGroup) -> None:
    """Concatenate every rank's ``source`` into ``destination``: numel × group size."""
    _all_gather(destination, source, group=group)


def reduce_scatter_flat(
    destination: Tensor, source: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType
) -> None:
    """Combine every rank's ``source`` and keep this rank's slice, in the backend's own order of additions."""
    _reduce_scatter(destination, source, op=op, group=group)
