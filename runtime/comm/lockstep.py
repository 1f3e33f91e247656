"""Collectives among all ranks in one process: the reference semantics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroir.ir.ops import Reduction
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import CollectiveTensors, combine, to_wire


class LockstepComm:
    """Collectives among all ranks of the mesh, which one process holds in rank order."""

    def __init__(self, program: Program) -> None:
        self._groups = {comm.name: program.mesh.groups(comm.axis) for comm in program.comms}

    def all_gather(self, tensors: CollectiveTensors) -> None:
        for group, index in self._each(tensors):
            gathered = torch.cat(self._sources(tensors, group, index))
            for rank in group:
                tensors.pairs[rank][index].destination.copy_(gathered)

    def reduce_scatter(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        for group, index in self._each(tensors):
            # A destination may be part of a source, so all results are computed before any is written.
            sources = self._sources(tensors, group, index)
            slices = [source.chunk(len(group)) for source in sources]
            results: list[Tensor] = []
            for coordinate, rank in enumerate(group):
                result = torch.empty_like(tensors.pairs[rank][index].destination)
                combine([parts[coordinate] for parts in slices], reduction, result)
                results.append(result)
            for rank, result in zip(group, results, strict=True):
                tensors.pairs[rank][index].destination.copy_(result)

    def all_reduce(self, tensors: CollectiveTensors, reduction: Reduction) -> None:
        for group, index in self._each(tensors):
            result = torch.empty_like(tensors.pairs[group[0]][index].destination)
            combine(self._sources(tensors, group, index), reduction, result)
            for rank in group:
                tensors.pairs[rank][index].destination.copy_(result)

    def broadcast(self, tensors: CollectiveTensors, root: int) -> None:
        for group, index in self._each(tensors):
            source = self._sources(tensors, group, index)[root].clone()
            for rank in group:
                tensors.pairs[rank][index].destination.copy_(source)

    def close(self) -> None:
        """Do nothing: the backend holds no resources."""

    def _each(self, tensors: CollectiveTensors) -> list[tuple[tuple[int, ...], int]]:
        count = len(tensors.pairs[0])
        return [(group, index) for group in self._groups[tensors.comm] for index in range(count)]

    @staticmethod
    def _sources(tensors: CollectiveTensors, group: Sequence[int], index: int) -> list[Tensor]:
        return [to_wire(tensors.pairs[rank][index].source, tensors.wire_dtype) for rank in group]
