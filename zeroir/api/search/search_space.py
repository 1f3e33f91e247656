"""The space of a search for the best options: a grid of options for every stage and mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final, assert_never

from zeroir.api.search.unit_classes import repeated_units, to_recompute, to_unshard, unit_classes
from zeroir.config import CompileOptions, has_effect, replaced
from zeroir.config.field_types import LAYER, STEP
from zeroir.config.meshes import parse_mesh
from zeroir.config.offload_places import (
    ACTIVATIONS,
    DISK,
    GRADIENTS,
    HOST,
    OFFLOADED,
    OPTIMIZER,
    PAGE_BYTES,
    PARAMETERS,
)
from zeroir.cost.search import Family, Point
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS, VALUES_COMM
from zeroir.ir.program import Program
from zeroir.passes.common.units import ALL_REPEATED
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.report.names import format_bytes

Value = int | bool | str | tuple[str, ...] | None

EARLY: Final = "early"
"""The value of ``prefetch`` for gathers as early as memory allows."""

_PREFETCH: Final = (0, 1, 2, 3, 4, EARLY)
_LIVE_GRADIENTS: Final = (1, 2, 3, 4)
_MOST_TIMES: Final = 64
"""The largest factor by which a proposal raises the number of ranks."""
_INTERLEAVED: Final = (2, 4, 8)
"""Sizes of groups of micro-batches that run unit by unit; the program's length grows with them."""
PAGE_SLOTS: Final = 3
"""The fewest pages on the device: one is copied in and one out while a third is updated."""

_BUCKET_BYTES: Final = (0, 25_000_000, 100_000_000, 400_000_000)


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
    orders: tuple[str, ...] = ()

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


def with_offload(regions: Sequence[SearchRegion], kinds: Sequence[str]) -> tuple[SearchRegion, ...]:
    """Add every useful set of these kinds to offload to the choices."""
    states = tuple(kind for kind in (OPTIMIZER, GRADIENTS) if kind in kinds)
    activations = tuple(kind for kind in (ACTIVATIONS,) if kind in kinds)
    parameters = tuple(kind for kind in (PARAMETERS,) if kind in kinds)
    sets = dict.fromkeys(
        tuple(kind for kind in OFFLOADED if kind in chosen)
        for chosen in (
            (),
            activations,
            states,
            states + activations,
            states + parameters,
            states + activations + parameters,
        )
    )
    dimension = Dimension(name="offload", values=tuple(sets), fast=0, usual=0, lean=len(sets) - 1)
    has_orders = PARAMETERS in kinds
    return tuple(
        replace(
            region,
            dimensions=(
                *region.dimensions,
                *(_order(region.orders) if has_orders and not region.values("order") else ()),
                dimension,
            ),
        )
        for region in regions
    )


def _order(orders: tuple[str, ...]) -> tuple[Dimension, ...]:
    """Return the dimension of the order of micro-batches if there is a choice: larger groups communicate less."""
    if len(orders) < 2:
        return ()
    return (Dimension(name="order", values=orders, fast=len(orders) - 1, usual=0, lean=0),)


def _orders(options: CompileOptions, logical: Program) -> tuple[str, ...]:
    """Return the orders of micro-batches to choose from, the largest groups last; one if there is no choice."""
    if "order" in options.given:
        return ()
    count = options.micro_steps.count
    groups = [group for group in _INTERLEAVED if count % group == 0]
    try:
        OrderByLayer(micro_batches=2)(logical)
    except UserError:
        groups = []
    if options.micro_steps.accumulate_locally:
        groups = [group for group in groups if group != count]
    return (STEP, *(LAYER if group == count else f"{LAYER}={group}" for group in groups))


def with_disk(regions: Sequence[SearchRegion]) -> tuple[SearchRegion, ...]:
    """Add the disk to the choices as a place of what is offloaded."""
    dimension = Dimension(name="offload_to", values=(HOST, DISK), fast=0, usual=0, lean=1)
    return tuple(replace(region, dimensions=(*region.dimensions, dimension)) for region in regions)


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
        values = (None, *map(page_amount, amounts))
        dimension = Dimension(
            name="page_optimizer", values=values, fast=0, usual=0, lean=len(values) - 1
        )
        return replace(region, dimensions=(*region.dimensions, dimension))

    return tuple(map(paged, regions))


def page_amount(pages: int) -> str:
    """Return the option for this number of pages of the usual size on the device, including slots."""
    return f"{pages * parse_bytes(PAGE_BYTES) >> 20}MiB"


def _offload_sets(kinds: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the useful sets of these kinds, the largest last.

    States and gradients are offloaded together, and parameters only with them: they are copied most for their bytes.
    """
    states = (OPTIMIZER, GRADIENTS)
    sets = (
        (ACTIVATIONS,),
        states,
        (*states, ACTIVATIONS),
        (*states, PARAMETERS),
        (*states, ACTIVATIONS, PARAMETERS),
    )
    possible = (tuple(k for k in OFFLOADED if k in chosen and k in kinds) for chosen in sets)
    return tuple(filter(None, dict.fromkeys(possible)))


def words(settings: Mapping[str, Value]) -> str:
    """Return a choice in short: ``stage 3, prefetch 2``; options that are off are left out."""
    said: list[str] = []
    for name, value in settings.items():
        match name, value:
            case "stage", _:
                said.append(f"stage {value}")
            case "mesh", str():
                said.append(value)
            case "bucket", int() if value:
                said.append(f"buckets of {format_bytes(value)}")
            case _, ():
                pass
            case ("offload_to", "host") | ("order", "step"):
                pass
            case "page_optimizer", str():
                said.append(f"pages of the optimizer in {value}")
            case "offload", tuple():
                said.append(f"offload {', '.join(value)}")
            case _, tuple():
                said.append(f"{name} {unit_ranges(value)}")
            case _, bool():
                said.append(f"{'' if value else 'no-'}{name.replace('_', '-')}")
            case _, None | 0:
                pass
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
    stages = [
        stage
        for stage in ((options.stage,) if "stage" in is_set else (0, 1, 2, 3))
        if has_effect(replaced(options, stage=stage))
    ]
    units = repeated_units(logical)
    orders = _orders(options, logical) if options.micro_steps.count > 1 else ()
    made: list[SearchRegion] = []
    for stage in stages:
        is_of_one_axis = "mesh" in is_set or VALUES_COMM in logical.comm_by_name
        meshes = [options.mesh] if is_of_one_axis else _meshes(stage, options.world_size)
        dimensions = tuple(
            dimension
            for dimension in (
                *_dimensions(stage, logical),
                # Below stage 2 it only affects how often parameters are copied from host memory.
                *(_order(orders) if stage >= 2 or PARAMETERS in options.offload.what else ()),
            )
            if dimension.name not in is_set
            and not (dimension.name == "prefetch" and _is_prefetch_set(options))
        )
        made += [
            SearchRegion(stage=stage, mesh=mesh, units=units, dimensions=dimensions, orders=orders)
            for mesh in meshes
        ]
    return tuple(made)


def _is_prefetch_set(options: CompileOptions) -> bool:
    """Return whether an option other than ``prefetch`` determines how early parameters are gathered."""
    return options.prefetch.memory is not None or options.prefetch.most_bytes is not None


def leaner_settings(
    options: CompileOptions, logical: Program, kinds: Callable[[], Collection[str]]
) -> Iterator[Mapping[str, Value]]:
    """Yield changes to options that free memory, in the order of their cost in a step; the mesh stays.

    ``kinds`` returns what can be kept outside device memory.

    Changes without communication come first: fewer full gradients at once, fewer saved values, stages up to 2. Then
    come those that expose or add communication: no prefetch, stage 3; then the recomputation of every unit, and then
    offloading. More ranks come last.
    """
    stage = options.stage
    lean: dict[str, Value] = {}
    if not options.recompute.select_saved:
        lean["select_saved"] = True
        yield dict(lean)
    if stage >= 2 and options.communication.live_gradients > 1:
        yield {**lean, "live_gradients": 1}
    for higher in range(stage + 1, 3):
        yield {**lean, "stage": higher}
    if stage < 2:
        yield {**lean, "stage": 2, "live_gradients": 1}
    if stage < 3:
        yield {**lean, "stage": 3}
    leanest = {**lean, **({"stage": 3} if stage < 3 else {})}
    if options.communication.live_gradients > 1:
        leanest["live_gradients"] = 1
    # A budget of its own determines how early parameters are gathered, for any distance.
    if options.prefetch.units and not _is_prefetch_set(options):
        if stage == 3:
            yield {**lean, "prefetch": 0}
        leanest["prefetch"] = 0
    if options.micro_steps.order != STEP:
        yield {**lean, "order": STEP}
        leanest["order"] = STEP
    if leanest:
        yield dict(leanest)
    if repeated_units(logical) and not options.recompute.units:
        yield {**lean, "recompute": (ALL_REPEATED,)}
        leanest["recompute"] = (ALL_REPEATED,)
        yield dict(leanest)
    if not options.offload.what:
        sets = _offload_sets(kinds())
        for offloaded in sets:
            yield {**lean, "offload": offloaded}
        if sets:
            leanest["offload"] = sets[-1]
            yield dict(leanest)
    times = 2
    is_for_any_ranks = options.mesh is None and VALUES_COMM not in logical.comm_by_name
    while is_for_any_ranks and times <= _MOST_TIMES:
        yield {**leanest, "world_size": options.world_size * times}
        times *= 2


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


def _dimensions(stage: int, logical: Program) -> Sequence[Dimension | UnitCounts]:
    """Return the options to choose at a stage."""
    kinds = unit_classes(logical)
    # Buckets beyond the size of the model have the same effect.
    whole_bytes = 4 * logical.parameters_numel
    sizes = tuple(
        size
        for at, size in enumerate(_BUCKET_BYTES)
        if not at or _BUCKET_BYTES[at - 1] < whole_bytes
    )
    saved = Dimension(name="select_saved", values=(False, True), fast=0, usual=1, lean=1)
    again = UnitCounts(name="recompute", kinds=to_recompute(kinds), is_fast=False)
    bucket = Dimension(name="bucket", values=sizes, fast=min(2, len(sizes) - 1), usual=0, lean=0)
    live = Dimension(name="live_gradients", values=_LIVE_GRADIENTS, fast=3, usual=1, lean=0)
    ahead = Dimension(name="prefetch", values=_PREFETCH, fast=2, usual=1, lean=0)
    whole = UnitCounts(name="unshard", kinds=to_unshard(kinds), is_fast=True)
    return (
        saved,
        again,
        bucket,
        *((live,) if stage >= 2 else ()),
        *((ahead, whole) if stage == 3 else ()),
    )
