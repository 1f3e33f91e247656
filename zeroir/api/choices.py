"""What a search for the best options may choose from: a grid of options for every stage and mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zeroir.config import CompileOptions
from zeroir.cost.search import Family, Point
from zeroir.ir import ops
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS
from zeroir.ir.program import Program
from zeroir.report.names import counted, format_bytes

Value = int | bool | str | None

EARLY: Final = "early"
"""The value of ``prefetch`` for gathers that are as early as the memory allows."""

_PREFETCH: Final = (0, 1, 2, 3, 4, EARLY)
_LIVE_GRADIENTS: Final = (1, 2, 3, 4)
_BUCKET_BYTES: Final = (0, 25_000_000, 100_000_000, 400_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One option that is chosen: its values, and by their index those of most speed, by default, and of least memory.

    The values of ``recompute`` and ``unshard`` count units, those of ``prefetch`` too, or are ``early``.
    """

    name: str
    values: tuple[Value, ...]
    fast: int
    usual: int
    lean: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Choices of one stage and one mesh."""

    stage: int
    mesh: str | None
    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        """How many choices these are."""
        count = 1
        for dimension in self.dimensions:
            count *= len(dimension.values)
        return count

    def settings(self, point: Point) -> Mapping[str, Value]:
        """What a point of the grid chooses, by option."""
        chosen = {d.name: d.values[at] for d, at in zip(self.dimensions, point, strict=True)}
        return {"stage": self.stage, "mesh": self.mesh, **chosen}

    def values(self, name: str) -> tuple[Value, ...]:
        """The values of a dimension; none where there is no such one."""
        return next((d.values for d in self.dimensions if d.name == name), ())

    @property
    def starts(self) -> tuple[Point, ...]:
        """Where to begin: with what takes least time by itself, with what is usual, with what takes least memory."""
        starts = (
            tuple(d.fast for d in self.dimensions),
            tuple(d.usual for d in self.dimensions),
            tuple(d.lean for d in self.dimensions),
        )
        return tuple(dict.fromkeys(starts))

    @property
    def family(self) -> Family:
        """The grid."""
        return Family(sizes=tuple(len(d.values) for d in self.dimensions), starts=self.starts)


def words(settings: Mapping[str, Value]) -> str:
    """A choice in short: ``stage 3, prefetch 2``; what is off is left out."""
    said: list[str] = []
    for name, value in settings.items():
        match name, value:
            case "stage", _:
                said.append(f"stage {value}")
            case "mesh", str():
                said.append(value)
            case "bucket", int() if value:
                said.append(f"buckets of {format_bytes(value)}")
            case "recompute" | "unshard", int() if value:
                said.append(f"{name} {counted(value, 'unit')}")
            case _, bool():
                said.append(f"{'' if value else 'no-'}{name.replace('_', '-')}")
            case _, None | 0:
                pass
            case _:
                said.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(said)


def repeated_units(program: Program) -> tuple[str, ...]:
    """The units that a model repeats, such as its blocks, in the order of their first use."""
    units = dict.fromkeys(op.unit for op in program.ops() if isinstance(op, ops.Compute))
    return tuple(unit for unit in units if not unit.startswith("root."))


def regions(options: CompileOptions, logical: Program) -> tuple[Region, ...]:
    """All choices that leave alone what is set in the options."""
    is_set = options.model_fields_set
    stages = (options.stage,) if "stage" in is_set else (0, 1, 2, 3)
    found: list[Region] = []
    for stage in stages:
        meshes = [options.mesh] if "mesh" in is_set else _meshes(stage, options.world_size)
        dimensions = tuple(
            one
            for one in _dimensions(stage, logical)
            if one.name not in is_set and not (one.name == "prefetch" and options.prefetch_budget)
        )
        found += [Region(stage=stage, mesh=mesh, dimensions=dimensions) for mesh in meshes]
    return tuple(found)


def _meshes(stage: int, world_size: int) -> list[str | None]:
    """One group, and where something is sharded every way to make equal groups of ranks."""
    found: list[str | None] = [None]
    if stage:
        found += [
            f"{REPLICATE_AXIS}={world_size // shard},{SHARD_AXIS}={shard}"
            for shard in range(2, world_size)
            if world_size % shard == 0
        ]
    return found


def _dimensions(stage: int, logical: Program) -> tuple[Dimension, ...]:
    """What is to be chosen at a stage."""
    counts = tuple(range(len(repeated_units(logical)) + 1))
    # Beyond what there is, all buckets are alike.
    whole_bytes = 4 * logical.parameters_numel
    sizes = tuple(
        size
        for at, size in enumerate(_BUCKET_BYTES)
        if not at or _BUCKET_BYTES[at - 1] < whole_bytes
    )
    saved = Dimension(name="select_saved", values=(False, True), fast=0, usual=1, lean=1)
    again = Dimension(name="recompute", values=counts, fast=0, usual=0, lean=len(counts) - 1)
    bucket = Dimension(name="bucket", values=sizes, fast=min(2, len(sizes) - 1), usual=0, lean=0)
    live = Dimension(name="live_gradients", values=_LIVE_GRADIENTS, fast=3, usual=1, lean=0)
    ahead = Dimension(name="prefetch", values=_PREFETCH, fast=2, usual=1, lean=0)
    whole = Dimension(name="unshard", values=counts, fast=len(counts) - 1, usual=0, lean=0)
    return (
        saved,
        again,
        bucket,
        *((live,) if stage >= 2 else ()),
        *((ahead, whole) if stage == 3 else ()),
    )
