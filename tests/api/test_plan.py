"""A plan is the best of its space, says why the rest lost, and is what compiling with its options makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest

import zeroir
from tests.cost.support import machine
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.api.capture import capture
from zeroir.api.keywords import CompileKeywords
from zeroir.api.search.budget import leaner_settings
from zeroir.api.search.planner import Planner
from zeroir.api.search.search_space import (
    Dimension,
    regions,
    unit_ranges,
    with_disk,
    with_offload,
    with_pages,
    words,
)
from zeroir.api.search.unit_classes import UnitClass, to_unshard, unit_classes
from zeroir.config import CompileOptions, make_options
from zeroir.config.communication import Communication
from zeroir.config.offload_places import OFFLOADED
from zeroir.config.searched import Value
from zeroir.cost.machine import Machine
from zeroir.cost.search import Point, SearchOutcome, search
from zeroir.cost.simulate import simulate
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.passes.pipelines import for_options

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
MODELS = Path(__file__).parents[1] / "support" / "models"
LOOSE = 10**12
BOUND_BY_NETWORK = machine(
    node_ranks=2,
    flops_per_s=1e9,
    memory_bytes_per_s=1e9,
    node_bytes_per_s=1e8,
    network_bytes_per_s=2e7,
    node_latency_s=1e-5,
    network_latency_s=5e-5,
    issue_s=1e-6,
)
BOUND_BY_COMPUTE = machine(
    flops_per_s=1e9, memory_bytes_per_s=1e9, node_bytes_per_s=1e9, node_latency_s=1e-5, issue_s=1e-6
)


def planner(
    logical: Program, on: Machine, budget_bytes: int = LOOSE, /, **options: object
) -> Planner:
    return Planner(logical, make_options(options), on, budget_bytes)


Choice = tuple[tuple[str, Value], ...]


def identity(settings: Mapping[str, Value]) -> Choice:
    return tuple(settings.items())


def every_choice(found: Planner) -> Iterator[tuple[int, Mapping[str, Value]]]:
    """All there is to choose: of options that name units every subset, be it a point of the search or not."""
    for number, region in enumerate(found.regions):
        subsets = [
            ("*",) if len(units) == len(region.units) else units
            for count in range(len(region.units) + 1)
            for units in itertools.combinations(region.units, count)
        ]
        values = [d.values if isinstance(d, Dimension) else subsets for d in region.dimensions]
        names = [dimension.name for dimension in region.dimensions]
        for chosen in itertools.product(*values):
            settings = dict(zip(names, chosen, strict=True))
            yield number, {"stage": region.stage, "mesh": region.mesh, **settings}


def within(outcome: SearchOutcome, budget_bytes: int) -> SearchOutcome:
    """The outcome as it is with a budget."""
    missing = max(0, outcome.needed_bytes - budget_bytes)
    return SearchOutcome(
        missing_bytes=missing, needed_bytes=outcome.needed_bytes, step_ns=outcome.step_ns
    )


def require_close_to_the_best(found: Planner) -> None:
    """Compare with all there is, by the same simulator, at budgets from the least that anything needs to the most."""
    table = {
        (number, identity(settings)): found.measurer.measure(settings)[1]
        for number, settings in every_choice(found)
    }

    def look_up(number: int, point: Point) -> SearchOutcome:
        return table[number, identity(found.regions[number].settings(point))]

    families = [region.family for region in found.regions]
    for number, family in enumerate(families):
        floor_ns = found.bound_ns(number, None)
        assert all(floor_ns <= one.step_ns for (of, _), one in table.items() if of == number)
        for point in itertools.product(*map(range, family.sizes)):
            assert floor_ns <= found.bound_ns(number, point) <= look_up(number, point).step_ns
    needs = sorted({outcome.needed_bytes for outcome in table.values()})
    for budget_bytes in needs[:: max(1, len(needs) // 20)]:

        def evaluate(number: int, point: Point, budget_bytes: int = budget_bytes) -> SearchOutcome:
            return within(look_up(number, point), budget_bytes)

        plan = search(families, evaluate, found.bound_ns, most_tried=500)
        got = evaluate(plan.winner, plan.best[plan.winner])
        best = min((within(one, budget_bytes) for one in table.values()), key=lambda one: one.key)
        assert got.fits
        assert got.step_ns <= 1.03 * best.step_ns
        assert plan.is_finished


def test_a_plan_is_close_to_the_best_of_a_small_space() -> None:
    require_close_to_the_best(
        planner(
            mlp(blocks=2, dim=64, batch=64),
            BOUND_BY_COMPUTE,
            world_size=2,
            stage=3,
            select_saved=True,
            bucket=0,
            live_gradients=1,
            prefetch=1,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "world_size", "on", "options"),
    [
        (
            3,
            4,
            BOUND_BY_NETWORK,
            {"bucket": 0, "select_saved": True, "live_gradients": 2, "prefetch": 2},
        ),
        (2, 2, BOUND_BY_COMPUTE, {"bucket": 0, "live_gradients": 2}),
        (2, 8, BOUND_BY_NETWORK, {"select_saved": True, "live_gradients": 2, "prefetch": 1}),
    ],
)
def test_a_plan_is_close_to_the_best(
    blocks: int, world_size: int, on: Machine, options: dict[str, Value]
) -> None:
    logical = mlp(blocks=blocks, dim=64, batch=64)
    require_close_to_the_best(planner(logical, on, world_size=world_size, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "units", "on"),
    [("mixed", "blocks.*", BOUND_BY_COMPUTE), ("coder", "*coder.*", BOUND_BY_NETWORK)],
)
def test_a_plan_is_close_to_the_best_where_units_are_not_alike(
    factory: str, units: str, on: Machine
) -> None:
    """Which units are computed again and which stay whole is chosen among all subsets of them."""
    fixed = {"stage": 3, "mesh": None, "bucket": 0, "select_saved": True, "live_gradients": 1}
    options = make_options({"world_size": 4, "units": units, "prefetch": 2, **fixed})
    logical = capture(f"{MODELS / 'uneven.py'}:{factory}", options).artifact.logical
    found = Planner(logical, options, on, LOOSE)
    assert len(unit_classes(logical)) == {"mixed": 3, "coder": 2}[factory]
    require_close_to_the_best(found)


OFFLOADING: dict[str, object] = {
    "world_size": 2,
    "stage": 3,
    "bucket": 0,
    "live_gradients": 1,
    "prefetch": 1,
    "select_saved": True,
    "unshard": (),
}


@pytest.mark.slow
def test_a_plan_is_close_to_the_best_where_it_may_offload() -> None:
    found = planner(mlp(blocks=2, dim=64, batch=64), BOUND_BY_COMPUTE, **OFFLOADING)
    found.regions = with_offload(found.regions, ("optimizer", "parameters"))
    assert {d.name for d in found.regions[0].dimensions} == {"recompute", "offload"}
    require_close_to_the_best(found)


@pytest.mark.slow
def test_what_fits_nowhere_else_is_offloaded() -> None:
    logical = mlp(blocks=3, dim=64)
    resident = planner(logical, BOUND_BY_COMPUTE, offload=(), **OFFLOADING)
    least = min(
        resident.measurer.measure(settings)[0].needed_bytes
        for _, settings in every_choice(resident)
    )
    tight = planner(logical, BOUND_BY_COMPUTE, least - 1, **OFFLOADING)
    chosen = tight.search().chosen
    assert chosen.needed_bytes < least
    assert chosen.settings["offload"]
    whole = {**chosen.settings, "offload_units": ()}
    assert (chosen.step_ns or 0) <= (tight.measurer.measure(whole)[0].step_ns or 0)
    assert "offload" in words(chosen.settings)


@pytest.mark.slow
def test_a_plan_pages_the_optimizer_where_the_host_is_slow() -> None:
    """Of 28 MiB of states a rank as much rests on the device as there is memory for, in whole pages."""
    memory = BOUND_BY_COMPUTE.host.memory
    slow = memory.model_copy(
        update={"bytes_per_s": memory.bytes_per_s.model_copy(update={"value": 1e7})}
    )
    on = BOUND_BY_COMPUTE.model_copy(
        update={"host": BOUND_BY_COMPUTE.host.model_copy(update={"memory": slow})}
    )
    logical = mlp(blocks=5, dim=1216, batch=16)
    fixed = {**OFFLOADING, "recompute": ()}
    whole = planner(logical, on, offload=(), **fixed).search().chosen
    budget_bytes = whole.needed_bytes - (13 << 20)
    found = planner(logical, on, budget_bytes, **fixed)
    chosen = found.search().chosen
    amount = chosen.settings["page_optimizer"]
    assert isinstance(amount, str)
    assert not chosen.settings.get("offload")
    assert chosen.needed_bytes <= budget_bytes
    assert f"pages of the optimizer in {amount}" in words(chosen.settings)
    more = f"{int(amount.removesuffix('MiB')) + 2}MiB"
    assert not found.measurer.measure({**chosen.settings, "page_optimizer": more})[1].fits
    offloads = {settings["offload"] for _, settings in every_choice(found)} - {()}
    others = (found.measurer.measure({"stage": 3, "mesh": None, "offload": o}) for o in offloads)
    assert min(outcome.step_ns for _, outcome in others if outcome.fits) > (chosen.step_ns or 0)


@pytest.mark.slow
def test_what_the_host_has_no_room_for_goes_to_the_disk() -> None:
    logical = mlp(blocks=3, dim=64)
    resident = planner(logical, BOUND_BY_COMPUTE, offload=(), **OFFLOADING)
    least = min(
        resident.measurer.measure(settings)[0].needed_bytes
        for _, settings in every_choice(resident)
    )
    wide = planner(logical, BOUND_BY_COMPUTE, least - 1, **OFFLOADING).search().chosen
    assert "offload_to" not in wide.settings
    assert wide.host_bytes > 0
    host = BOUND_BY_COMPUTE.host
    size = host.memory.size_bytes.model_copy(update={"value": 1.3 * wide.host_bytes})
    memory = host.memory.model_copy(update={"size_bytes": size})
    narrow = BOUND_BY_COMPUTE.model_copy(
        update={"host": host.model_copy(update={"memory": memory})}
    )
    found = planner(logical, narrow, least - 1, **OFFLOADING)
    chosen = found.search().chosen
    # Two ranks share the host.
    assert chosen.host_bytes <= 0.65 * wide.host_bytes
    assert chosen.settings["offload_to"] == "disk"
    assert "offload to disk" in words(chosen.settings)


def test_where_memory_is_no_limit_nothing_is_offloaded() -> None:
    found = planner(mlp(blocks=2, dim=64), BOUND_BY_COMPUTE, **OFFLOADING)
    assert "offload" not in found.search().chosen.settings


def test_of_too_many_kinds_the_nearest_count_as_one() -> None:
    kinds = [
        UnitClass(
            units=(f"a.{number}", f"b.{number}"), parameters_numel=numel, saved_bytes=0, flops=0
        )
        for number, numel in enumerate((100, 2, 90, 1000, 10, 20000))
    ]
    assert to_unshard(kinds) == (
        ("b.5", "a.5"),
        ("b.3", "a.3"),
        ("b.2", "a.2", "b.0", "a.0"),
        ("b.1", "a.1", "b.4", "a.4"),
    )
    assert to_unshard(kinds[:1]) == (("b.0", "a.0"),)


def test_units_are_named_in_short() -> None:
    assert unit_ranges(("encoder.0", "encoder.1", "encoder.3", "decoder.4", "neck")) == (
        "encoder.0-1 encoder.3 decoder.4 neck"
    )
    assert unit_ranges(("*",)) == "all"


def test_what_is_set_is_kept_and_the_rest_is_chosen() -> None:
    logical = mlp(blocks=2)
    free = regions(CompileOptions(world_size=4), logical)
    assert {(one.stage, one.mesh) for one in free} == {
        (0, None),
        *((stage, mesh) for stage in (1, 2, 3) for mesh in (None, "replicate=2,shard=2")),
    }
    narrowed = regions(CompileOptions.from_flat({"world_size": 4, "live_gradients": 1}), logical)
    assert {one.stage for one in narrowed} == {2, 3}
    (one,) = regions(
        CompileOptions.from_flat({"world_size": 4, "stage": 3, "mesh": None, "prefetch": 2}),
        logical,
    )
    names = {dimension.name for dimension in one.dimensions}
    assert names == {"select_saved", "recompute", "bucket", "live_gradients", "unshard"}
    found = planner(logical, BOUND_BY_NETWORK, world_size=4, stage=3, prefetch=2, mesh=None)
    options = found.measurer.options({"stage": 3, "recompute": ("blocks.0",), "unshard": ("*",)})
    assert (options.prefetch.units, options.recompute.units, options.unshard.units) == (
        2,
        ("blocks.0",),
        ("*",),
    )


@pytest.mark.parametrize(
    ("given", "determined"),
    [
        ({}, set()),
        ({"micro_steps": 4, "accumulate_locally": True}, {"live_gradients"}),
        ({"prefetch_bytes": 1000}, {"prefetch"}),
        ({"prefetch_budget": "1GB"}, {"prefetch"}),
    ],
)
def test_what_another_option_determines_is_not_chosen(
    given: dict[str, object], determined: set[str]
) -> None:
    logical = mlp(blocks=2, micro_steps=cast("int", given.get("micro_steps", 1)))
    options = make_options({"world_size": 4, **given})
    found = Planner(logical, options, BOUND_BY_NETWORK, LOOSE)
    for region in found.regions:
        assert determined.isdisjoint(dimension.name for dimension in region.dimensions)
        for start in region.family.starts:
            assert found.measurer.options(region.settings(start)).stage == region.stage
    for settings in leaner_settings(options, logical, lambda: OFFLOADED):
        assert determined.isdisjoint(settings)
        found.measurer.options(settings)  # which refuses what has no effect


def test_every_option_that_is_declared_as_searched_is_tried() -> None:
    declared = {
        name: row.option.searched
        for name, row in CompileOptions.rows().items()
        if row.option.searched is not None
    }
    places = [searched.axis for searched in declared.values() if searched.axis is not None]
    assert len(places) == len(set(places))
    last_resorts = {name for name, searched in declared.items() if searched.is_last_resort}
    logical = mlp(blocks=2, dim=64, micro_steps=4)
    made = regions(make_options({"world_size": 4, "micro_steps": 4}), logical)
    tried = {dimension.name for region in made for dimension in region.dimensions}
    assert tried | {"stage", "mesh"} == declared.keys() - last_resorts
    pages = with_pages(made, 4, 2**30)
    for region in with_disk(with_offload(pages, OFFLOADED)):
        more = {dimension.name for dimension in region.dimensions}
        # The units are chosen once a kind is.
        assert last_resorts - more == {"offload_units"}


def test_a_plan_may_gather_as_early_as_memory_allows() -> None:
    found = planner(mlp(blocks=2), BOUND_BY_NETWORK, world_size=2)
    options = found.measurer.options({"stage": 3, "prefetch": "early"})
    assert options.prefetch.memory_bytes == LOOSE


def test_a_model_without_repeated_units_is_planned() -> None:
    found = planner(mlp(blocks=0), BOUND_BY_NETWORK, world_size=2, stage=3, bucket=0).search()
    assert found.chosen.settings["recompute"] == ()
    assert found.is_finished


def test_a_loser_is_told_why() -> None:
    logical = mlp(blocks=2, dim=64)
    fixed = {"world_size": 2, "bucket": 0, "live_gradients": 2, "prefetch": 0, "recompute": ()}
    tight = planner(logical, BOUND_BY_COMPUTE, unshard=(), select_saved=True, **fixed)
    needs = sorted(tight.evaluate(number, ()).needed_bytes for number in range(len(tight.regions)))
    tight = planner(logical, BOUND_BY_COMPUTE, needs[1], unshard=(), select_saved=True, **fixed)
    found = tight.search()
    lost = {one.candidate.settings["stage"]: one.why for one in found.alternatives}
    assert len(lost) == len(tight.regions) - 1
    fitting = [why for why in lost.values() if not why.startswith("does not fit")]
    assert len(fitting) == 1
    assert "bound by" in fitting[0]
    for why in lost.values():
        if why not in fitting:
            assert why.startswith("does not fit: needs at least ")
            assert "too many, most " in why
            assert "last_micro_step" in why or "of what rests there" in why


def test_a_choice_is_measured_as_what_it_compiles_to() -> None:
    """What does not fit is not placed, and then needs no less than is said."""
    logical = mlp(blocks=2, dim=64)
    found = planner(logical, BOUND_BY_NETWORK, world_size=4)
    for number in (0, 2, len(found.regions) - 1):
        settings = found.regions[number].settings(found.regions[number].family.starts[0])
        program = applied(logical, for_options(found.measurer.options(settings)))
        needed_bytes = footprint(program).total_bytes
        step_ns = simulate(program, BOUND_BY_NETWORK).step_ns
        candidate, outcome = found.measurer.measure(settings)
        assert (candidate.needed_bytes, candidate.step_ns) == (needed_bytes, step_ns)
        tight = planner(logical, BOUND_BY_NETWORK, needed_bytes // 2, world_size=4)
        candidate, outcome = tight.measurer.measure(settings)
        assert (candidate.step_ns, outcome.step_ns) == (None, step_ns)
        assert needed_bytes // 2 < candidate.needed_bytes <= needed_bytes


@pytest.mark.slow
def test_where_nothing_fits_the_closest_is_named() -> None:
    """The one that needs least; and where too much rests on a rank, whatever is chosen, how much that is."""
    logical = mlp(blocks=2)
    kept: dict[str, object] = {
        "world_size": 2,
        "bucket": 0,
        "live_gradients": 1,
        "prefetch": 1,
        "select_saved": True,
        "offload": (),
    }
    loose = planner(logical, BOUND_BY_COMPUTE, **kept)
    tried = [loose.measurer.measure(settings)[0] for _, settings in every_choice(loose)]
    needed = min(one.needed_bytes for one in tried)
    resting = min(one.resting_bytes for one in tried)
    assert resting < needed
    with pytest.raises(UserError, match="the closest is stage ") as caught:
        planner(logical, BOUND_BY_COMPUTE, needed - 1, **kept).search()
    assert f"needs at least {format_bytes(needed)}, 1 B too many" in str(caught.value)
    with pytest.raises(UserError, match="persistent buffers of a rank") as caught:
        planner(logical, BOUND_BY_COMPUTE, resting - 1, **kept).search()
    assert f"take {format_bytes(resting)} at least, at stage 3" in str(caught.value)


def test_a_choice_in_words() -> None:
    settings: dict[str, Value] = {
        "stage": 0,
        "mesh": None,
        "select_saved": False,
        "recompute": ("blocks.0",),
        "unshard": ("*",),
        "bucket": 25_000_000,
        "prefetch": 0,
    }
    expected = "stage 0, no-select-saved, recompute blocks.0, unshard all, buckets of 25.0 MB"
    assert words(settings) == expected


@pytest.mark.slow
def test_the_plan_is_what_compiling_with_its_options_makes() -> None:
    found = zeroir.plan(
        GPT,
        memory="24MB",
        world_size=4,
        stage=3,
        communication=Communication(bucket=0),
        most_tried=20,
    )
    assert found.chosen.needed_bytes <= found.budget_bytes == 24_000_000
    same = zeroir.compile(GPT, **cast("CompileKeywords", dict(found.compiled.options)))
    assert same.text() == found.compiled.text()
    assert same.report.laws["Z301"] == "proved"
    assert round(zeroir.simulate(same).step_s * 1e9) == found.chosen.step_ns
    assert found.bound_ns <= (found.chosen.step_ns or 0)


def test_a_slow_network_brings_parameters_once_for_all_micro_batches_that_fit() -> None:
    logical = mlp(blocks=2, dim=32, batch=64, micro_steps=4)
    options = {"stage": 3, "micro_steps": 4, "world_size": 4, "bucket": 0, "prefetch": 1}
    kept = {
        "live_gradients": 2,
        "select_saved": False,
        "recompute": (),
        "unshard": (),
        "offload": (),
    }
    free = planner(logical, BOUND_BY_NETWORK, **options, **kept, mesh=None).search()
    assert (free.chosen.settings["order"], free.tried) == ("layer", 3)
    less = free.chosen.needed_bytes - 1
    tight = planner(logical, BOUND_BY_NETWORK, less, **options, **kept, mesh=None).search()
    assert tight.chosen.settings["order"] == "layer=2"
    assert free.chosen.step_ns is not None
    assert tight.chosen.step_ns is not None
    assert tight.chosen.step_ns > free.chosen.step_ns
    kept_order = planner(logical, BOUND_BY_NETWORK, **options, **kept, order="step").regions
    assert not any(region.values("order") for region in kept_order)
