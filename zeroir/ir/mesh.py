"""The device mesh, the communicators over its axes, and the streams that ops run on.

Ranks are numbered row-major: in ``mesh replicate=2 shard=4`` rank 5 is at ``replicate=1, shard=1``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from zeroir.ir.fields import Declares, NameKind, Refers


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One ordered dimension of the mesh."""

    syntax: ClassVar[str] = "{name}={size}"

    name: Annotated[str, Declares(NameKind.AXIS)]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ordered axes; the product of their sizes is the world size."""

    syntax: ClassVar[str] = "{axes}..."

    axes: tuple[Axis, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    def has_axis(self, name: str) -> bool:
        """Return whether an axis of that name exists."""
        return any(axis.name == name for axis in self.axes)

    def size(self, name: str) -> int:
        """Return number of ranks along the axis; KeyError when it does not exist."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        raise KeyError(name)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yield the coordinate of every rank, in rank order."""
        names = [axis.name for axis in self.axes]
        for point in itertools.product(*(range(axis.size) for axis in self.axes)):
            yield dict(zip(names, point, strict=True))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of one rank."""
        point: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, point[axis.name] = divmod(rank, axis.size)
        return {axis.name: point[axis.name] for axis in self.axes}

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along the axis, each in axis order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, point in enumerate(self.coordinates()):
            key = tuple(at for axis, at in point.items() if axis != name)
            groups.setdefault(key, []).append(rank)
        return tuple(tuple(group) for group in groups.values())


DATA_AXIS = "dp"
"""The one axis of plain data parallelism."""

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"
"""The two axes of hybrid sharding: buffers are sharded along ``shard`` and equal along ``replicate``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A named channel over one mesh axis. Collectives on one communicator run in host launch order.

    A logical program, for one device, says of how many ranks its model gathers values: then the axis stands for
    ``ranks`` of them, and a schedule of the program must have as many.
    """

    syntax: ClassVar[str] = "{name} axis={axis} [ranks={ranks}]"

    name: Annotated[str, Declares(NameKind.COMMUNICATOR)]
    axis: Annotated[str, Refers(NameKind.AXIS, "communicator {name} runs over")]
    ranks: int | None = None


class Executor(StrEnum):
    """The executor of the ops of a stream."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A named queue: its ops run in program order; only waits order two streams."""

    syntax: ClassVar[str] = "{name}:{executor}"

    name: Annotated[str, Declares(NameKind.STREAM)]
    executor: Executor


HOST = "host"
"""The name, in ``wait !e on=host``, of the thread that issues the ops."""

VALUES_COMM = "values"
"""The communicator over which a model gathers values of all ranks, such as the features of a contrastive loss."""

COMPUTE = "compute"
GATHER = "gather"
REDUCE = "reduce"
COPY_IN = "copy_in"
COPY_OUT = "copy_out"
OPTIMIZER = "optimizer"
IO = "io"

STREAMS: tuple[Stream, ...] = (
    Stream(name=COMPUTE, executor=Executor.DEVICE),
    Stream(name=GATHER, executor=Executor.DEVICE),
    Stream(name=REDUCE, executor=Executor.DEVICE),
    Stream(name=COPY_IN, executor=Executor.DEVICE),
    Stream(name=COPY_OUT, executor=Executor.DEVICE),
    Stream(name=OPTIMIZER, executor=Executor.HOST),
    Stream(name=IO, executor=Executor.DISK),
)
"""The streams that a program declares by default."""
