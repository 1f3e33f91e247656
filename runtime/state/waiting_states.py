"""States of parameters that the program does not train now: they wait in host memory, a part on each rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir.contents import EMA, MASTER
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import CollectiveTensors, Comm, TensorPair
from zeroir.runtime.memory.rank_memory import RankMemory

Key = tuple[str, str]
"""A parameter and a quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingValues:
    """A quantity of a parameter that the program does not hold: ``own`` is this rank's part of it, on the host.

    Equal parts, the last ones filled up with zeros, follow each other along ``axis`` of the mesh; every rank has all
    elements where that is None.
    """

    axis: str | None
    numel: int
    own: Tensor


@dataclass(slots=True, kw_only=True)
class WaitingStates:
    """What waits for parameters that are not trained now, by parameter and quantity."""

    values: dict[Key, WaitingValues] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """How many steps each of them was trained in, where it was."""

    def forget_values(self, names: Collection[str]) -> None:
        """Forget the FP32 values and averages of these parameters, because the program has got others."""
        self.values = {
            (name, quantity): each
            for (name, quantity), each in self.values.items()
            if name not in names or quantity not in (MASTER, EMA)
        }

    @property
    def size_bytes(self) -> int:
        """The host memory of this rank that they take."""
        return sum(each.own.nbytes for each in self.values.values())


def own_part(program: Program, rank: int, values: Tensor) -> WaitingValues:
    """Return this rank's part of a quantity of a parameter, on the host."""
    axis = program.comms[0].axis if program.comms else None
    if axis is None:
        return WaitingValues(axis=None, numel=values.numel(), own=values.to("cpu", copy=True))
    most = -(-values.numel() // program.mesh.size(axis))
    own = torch.zeros(most, dtype=values.dtype)
    part = values[program.mesh.coordinate(rank)[axis] * most :][:most]
    own[: part.numel()].copy_(part)
    return WaitingValues(axis=axis, numel=values.numel(), own=own)


def whole_values(
    program: Program, memory: RankMemory, comm: Comm, waiting: WaitingValues
) -> Tensor:
    """Return all elements of what waits, from the parts of all ranks."""
    if waiting.axis is None:
        return waiting.own
    name = next((each.name for each in program.comms if each.axis == waiting.axis), None)
    if name is None:
        raise InternalError(f"no communicator of the program spans the axis {waiting.axis}")
    own = waiting.own.to(memory.device)
    whole = own.new_empty(program.mesh.size(waiting.axis) * own.numel())
    pair = TensorPair(source=own, destination=whole)
    comm.all_gather(CollectiveTensors(comm=name, pairs=[[pair]], staging=[None]))
    return whole[: waiting.numel]
