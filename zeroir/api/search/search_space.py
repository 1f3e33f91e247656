"""The space of a search for the best options: a grid of options for every stage and mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final, assert_never, cast

from zeroir.api.search.unit_classes import (
    UnitClass,
    repeated_units,
    to_recompute,
    to_unshard,
    unit_classes,
)
from zeroir.config import CompileOptions, has_effect, replaced
from zeroir.config.field_types import LAYER
from zeroir.config.meshes import parse_mesh
from zeroir.config.offload_places import (
    OFFLOAD_SETS,
    OPTIMIZER,
    PAGE_BYTES,
    PARAMETERS,
)
from zeroir.config.searched import Searched, Value
from zeroir.config.table import OptionRow
from zeroir.cost.search import Family, Point
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes, parse_bytes
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS, VALUES_COMM
from zeroir.ir.program import Program
from zeroir.passes.common.units import ALL_REPEATED
from zeroir.passes.communication.order_by_layer import OrderByLayer

PAGE_SLOTS: Final = 3
"""The fewest pages on the device: one is copied in and one out while a third is updated."""

_UNITS: Final[Mapping[str, Callable[[Sequence[UnitClass]], tuple[tuple[str, ...], ...]]]] = {
    "recompute": to_recompute,
    "unshard": to_unshard,
}
"""The units by kind, in the best order to name them in an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """An option to choose: its values, and the indices of the fastest, the default and the leanest in memory."""

    name: str
    values: tuple[Value, ...]
    fast: int
    usual: int
    lean: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCounts:
    """An option that names units: how many of each kind, counted from its first or from its last.

    ``kinds`` contains the units of each kind, in order. With ``is_fast`` naming all is fastest, otherwise naming none;
    the opposite has the least memory. By default none are named.
    """

    name: str
    kinds: tuple[tuple[str, ...], ...]
    is_fast: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes: one for each kind, and, if it matters, one for the end that is counted from."""
        counts = tuple(len(kind) + 1 for kind in self.kinds)
        return (*counts, 2) if self._has_ends else counts

    @property
    def size(self) -> int:
        """The number of sets of units that can be named."""
        counts = prod(len(kind) + 1 for kind in self.kinds)
        return 2 * counts - 2 ** len(self.kinds) if self._has_ends else counts

    def start(self, *, is_all: bool) -> Point:
        """Return the point with all units, or none."""
        counts = tuple(len(kind) if is_all else 0 for kind in self.kinds)
        return (*counts, 0) if self._has_ends else counts

    def units(self, at: Point) -> set[str]:
        """Return the units that a point names."""
        is_from_last = self._has_ends and at[-1] == 1
        return {
            unit
            for kind, count in zip(self.kinds, at, strict=False)
            for unit in (kind[len(kind) - count :] if is_from_last else kind[:count])
        }

    @property
    def _has_ends(self) -> bool:
        return any(len(kind) > 1 for kind in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRegion:
    """Choices of one stage and one mesh. ``units`` are all repeated units, in order.

    ``orders`` are those of micro-batches; they are a dimension if they affect communication.
    """

    stage: int
    mesh: str | None
    units: tuple[str, ...]
    dimensions: tuple[Dimension | UnitCounts, ...]
    orders: tuple[Value, ...] = ()

    @property
    def size(self) -> int:
        """The number of choices."""
        return prod(
            dimension.size if isinstance(dimension, UnitCounts) else len(dimension.values)
            for dimension in self.dimensions
        )

    def settings(self, point: Point) -> Mapping[str, Value]:
        """Return the settings at a point of the grid, by option."""
        chosen: dict[str, Value] = {"stage": self.stage, "mesh": self.mesh}
        rest = list(point)
        for dimension in self.dimensions:
            match dimension:
                case Dimension():
                    chosen[dimension.name] = dimension.values[rest.pop(0)]
                case UnitCounts():
                    at = tuple(rest.pop(0) for _ in dimension.sizes)
                    chosen[dimension.name] = self._named(dimension.units(at))
                case _:
                    assert_never(dimension)
        offloaded = chosen.get("offload")
        if isinstance(offloaded, tuple) and OPTIMIZER in offloaded:
            # The host updates these states, so none of them visits the device.
            chosen.pop("page_optimizer", None)
        return chosen

    def shards(self, world_size: int) -> int:
        """Return the number of ranks that share the optimizer's states."""
        if self.stage == 0:
            return 1
        return world_size if self.mesh is None else parse_mesh(self.mesh).size(SHARD_AXIS)

    def values(self, name: str) -> tuple[Value, ...]:
        """Return the values of a dimension; empty if there is none."""
        named = (d for d in self.dimensions if isinstance(d, Dimension) and d.name == name)
        return next((d.values for d in named), ())

    def _named(self, units: set[str]) -> tuple[str, ...]:
        """Return patterns that match exactly these units."""
        named = tuple(unit for unit in self.units if unit in units)
        return (ALL_REPEATED,) if named and named == self.units else named

    @property
    def family(self) -> Family:
        """The grid of points; its starts are the fastest, the default, and the leanest in memory."""
        sizes: list[int] = []
        fast: list[int] = []
        usual: list[int] = []
        lean: list[int] = []
        for dimension in self.dimensions:
            match dimension:
                case Dimension():
                    sizes.append(len(dimension.values))
                    for start, at in (
                        (fast, dimension.fast),
                        (usual, dimension.usual),
                        (lean, dimension.lean),
                    ):
                        start.append(at)
                case UnitCounts():
                    sizes += dimension.sizes
                    fast += dimension.start(is_all=dimension.is_fast)
                    usual += dimension.start(is_all=False)
                    lean += dimension.start(is_all=not dimension.is_fast)
                case _:
                    assert_never(dimension)
        starts = dict.fromkeys((tuple(fast), tuple(usual), tuple(lean)))
        return Family(sizes=tuple(sizes), starts=tuple(starts))


def _dimension(name: str, values: Sequence[Value]) -> Dimension:
    """Return an option as a dimension of these of its values; the fastest may be missing at their end."""
    row = CompileOptions.rows()[name]
    return Dimension(
        name=name,
        values=tuple(values),
        fast=range(len(values))[min(row.searched.fast, len(values) - 1)],
        usual=values.index(cast("Value", row.default)),
        lean=range(len(values))[row.searched.lean],
    )


def with_offload(regions: Sequence[SearchRegion], kinds: Sequence[str]) -> tuple[SearchRegion, ...]:
    """Add every useful set of these kinds to offload to the choices."""
    offload = _dimension("offload", offload_sets(kinds))
    has_orders = PARAMETERS in kinds
    return tuple(
        replace(
            region,
            dimensions=(
                *region.dimensions,
                *(_order(region.orders) if has_orders and not region.values("order") else ()),
                offload,
            ),
        )
        for region in regions
    )


def _order(orders: tuple[Value, ...]) -> tuple[Dimension, ...]:
    """Return the dimension of the order of micro-batches if there is a choice: larger groups communicate less."""
    return (_dimension("order", orders),) if len(orders) > 1 else ()


def _orders(options: CompileOptions, logical: Program) -> tuple[Value, ...]:
    """Return the orders of micro-batches to choose from, the largest groups last."""
    step, *groups = CompileOptions.rows()["order"].searched.values
    if "order" in options.given:
        return ()
    try:
        OrderByLayer(micro_batches=2)(logical)
    except UserError:
        return (step,)
    possible = [group for group in groups if has_effect(replaced(options, order=group))]
    whole = f"{LAYER}={options.micro_steps.count}"
    return (step, *(LAYER if group == whole else group for group in possible))


def with_disk(regions: Sequence[SearchRegion]) -> tuple[SearchRegion, ...]:
    """Add the disk to the choices as a place of what is offloaded."""
    place = _dimension("offload_to", CompileOptions.rows()["offload_to"].searched.values)
    return tuple(replace(region, dimensions=(*region.dimensions, place)) for region in regions)


def with_pages(
    regions: Sequence[SearchRegion], world_size: int, state_bytes: int
) -> tuple[SearchRegion, ...]:
    """Add paging of the optimizer's states, with their bytes on all ranks, to the choices.

    A part of a rank's states has memory on the device: three quarters, a half, a quarter, or just that of the slots.
    Choices whose states hardly need more than the slots stay unchanged.
    """

    def paged(region: SearchRegion) -> SearchRegion:
        pages = state_bytes // region.shards(world_size) // parse_bytes(PAGE_BYTES)
        if pages <= PAGE_SLOTS:
            return region
        shares = (pages * quarters // 4 for quarters in (3, 2, 1))
        amounts = dict.fromkeys((*(n for n in shares if n > PAGE_SLOTS), PAGE_SLOTS))
        resident = _dimension("page_optimizer", (None, *map(page_amount, amounts)))
        return replace(region, dimensions=(*region.dimensions, resident))

    return tuple(map(paged, regions))


def page_amount(pages: int) -> str:
    """Return the option for this number of pages of the usual size on the device, including slots."""
    return f"{pages * parse_bytes(PAGE_BYTES) >> 20}MiB"


def offload_sets(kinds: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the useful sets of these kinds, none first and the largest last."""
    possible = (tuple(kind for kind in chosen if kind in kinds) for chosen in OFFLOAD_SETS)
    return tuple(dict.fromkeys(possible))


def words(settings: Mapping[str, Value]) -> str:
    """Return a choice in short: ``stage 3, prefetch 2``; options that are off are left out."""
    rows = CompileOptions.rows()
    said: list[str] = []
    for name, value in settings.items():
        searched = rows[name].option.searched or Searched()
        if value in (None, ()) or value == searched.off:
            continue
        if searched.words is not None:
            amount = format_bytes(value) if isinstance(value, int) else ""
            shown = ", ".join(value) if isinstance(value, tuple) else value
            said.append(searched.words.format(value=shown, bytes=amount))
            continue
        match value:
            case tuple():
                said.append(f"{name} {unit_ranges(value)}")
            case bool():
                said.append(f"{'' if value else 'no-'}{name.replace('_', '-')}")
            case _:
                said.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(said)


def unit_ranges(units: Iterable[str]) -> str:
    """Return names of units in short: ``encoder.0-3 decoder.1``; all that are repeated are ``all``."""

    def place(unit: str) -> tuple[str, int]:
        stem, _, number = unit.rpartition(".")
        return (stem, int(number)) if number.isdecimal() else (unit, -1)

    def run(item: tuple[int, tuple[str, int]]) -> tuple[str, int]:
        at, (stem, number) = item
        return stem, number - at

    said: list[str] = []
    for _, items in groupby(enumerate(map(place, units)), run):
        places = [place for _, place in items]
        (stem, first), (_, last) = places[0], places[-1]
        if first < 0:
            said += ["all" if stem == ALL_REPEATED else stem]
        else:
            said.append(f"{stem}.{first}" + (f"-{last}" if last > first else ""))
    return " ".join(said)


def regions(options: CompileOptions, logical: Program) -> tuple[SearchRegion, ...]:
    """Return all choices that keep the given options, at the stages at which these have an effect."""
    is_set = options.given
    all_stages = CompileOptions.rows()["stage"].searched.values
    stages = [
        stage
        for stage in (
            (options.stage,) if "stage" in is_set else cast("tuple[int, ...]", all_stages)
        )
        if has_effect(replaced(options, stage=stage))
    ]
    units = repeated_units(logical)
    orders = _orders(options, logical) if options.micro_steps.count > 1 else ()
    made: list[SearchRegion] = []
    for stage in stages:
        is_of_one_axis = "mesh" in is_set or VALUES_COMM in logical.comm_by_name
        meshes = [options.mesh] if is_of_one_axis else _meshes(stage, options.world_size)
        dimensions = tuple(_dimensions(replaced(options, stage=stage), is_set, orders, logical))
        made += [
            SearchRegion(stage=stage, mesh=mesh, units=units, dimensions=dimensions, orders=orders)
            for mesh in meshes
        ]
    return tuple(made)


def _meshes(stage: int, world_size: int) -> list[str | None]:
    """Return one group, and, if something is sharded, every division into equal groups of ranks."""
    meshes: list[str | None] = [None]
    if stage:
        meshes += [
            f"{REPLICATE_AXIS}={world_size // shard},{SHARD_AXIS}={shard}"
            for shard in range(2, world_size)
            if world_size % shard == 0
        ]
    return meshes


def _dimensions(
    options: CompileOptions,
    is_set: Collection[str],
    orders: tuple[Value, ...],
    logical: Program,
) -> Iterator[Dimension | UnitCounts]:
    """Yield the options to choose at the stage of these, in the order of the axes of the search."""
    kinds = unit_classes(logical)
    for axis, row in _axes():
        name = row.name
        if name in is_set or options.stage < row.option.least_stage:
            continue
        if name == "order":
            # Below stage 2 it only affects how often parameters are copied from host memory.
            if options.stage >= 2 or PARAMETERS in options.offload.what:
                yield from _order(orders)
        elif name in _UNITS:
            yield UnitCounts(name=name, kinds=_UNITS[name](kinds), is_fast=axis.fast != 0)
        elif has_effect(replaced(options, **{name: axis.values[axis.fast]})):
            # Another option may determine it, such as a budget how early parameters are gathered.
            yield _dimension(name, _worth(name, axis.values, logical))


def _axes() -> list[tuple[Searched, OptionRow]]:
    """Return the options that are axes from the beginning, in order."""
    of_search = [(row.option.searched, row) for row in CompileOptions.rows().values()]
    axes = [(axis.axis, axis, row) for axis, row in of_search if axis and axis.axis is not None]
    return [(axis, row) for _, axis, row in sorted(axes, key=lambda each: each[0])]


def _worth(name: str, values: tuple[Value, ...], logical: Program) -> tuple[Value, ...]:
    """Return the values that differ in their effect: buckets beyond the size of the model all have the same."""
    if name != "bucket":
        return values
    whole_bytes = 4 * logical.parameters_numel
    sizes = cast("tuple[int, ...]", values)
    return tuple(s for at, s in enumerate(sizes) if not at or sizes[at - 1] < whole_bytes)
