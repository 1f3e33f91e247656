"""A plan is the best of its space, says why the rest lost, and is what compiling with its options makes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import zeroir
from tests.cost.support import machine
from tests.support.programs import mlp
from zeroir.api.choices import Value, regions, words
from zeroir.api.plan import Planner
from zeroir.config import CompileOptions, make_options
from zeroir.cost.machine import Machine
from zeroir.cost.search import Outcome, Point, search
from zeroir.errors import UserError
from zeroir.ir.program import Program

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
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
Table = dict[tuple[int, Point], Outcome]


def planner(
    logical: Program, on: Machine, budget_bytes: int = LOOSE, /, **options: object
) -> Planner:
    return Planner(logical, make_options(options), on, budget_bytes)


def every_point(found: Planner) -> list[tuple[int, Point]]:
    return [
        (number, point)
        for number, region in enumerate(found.regions)
        for point in itertools.product(*(range(len(d.values)) for d in region.dimensions))
    ]


def within(table: Table, budget_bytes: int) -> Table:
    """The outcomes as they are with a budget."""
    found: Table = {}
    for key, outcome in table.items():
        missing = max(0, outcome.needed_bytes - budget_bytes)
        found[key] = Outcome(
            missing_bytes=missing,
            needed_bytes=outcome.needed_bytes,
            step_ns=0 if missing else outcome.step_ns,
        )
    return found


def require_close_to_the_best(found: Planner) -> None:
    """Compare with all there is, by the same simulator, at budgets from the least that anything needs to the most."""
    table = {key: found.evaluate(*key) for key in every_point(found)}
    for number, _ in enumerate(found.regions):
        floor_ns = found.bound_ns(number, None)
        for (of, point), outcome in table.items():
            if of == number:
                assert floor_ns <= found.bound_ns(number, point) <= outcome.step_ns
    needs = sorted({outcome.needed_bytes for outcome in table.values()})
    families = [region.family for region in found.regions]
    for budget_bytes in needs[:: max(1, len(needs) // 20)]:
        known = within(table, budget_bytes)
        plan = search(families, lambda *key: known[key], found.bound_ns, most_tried=500)  # noqa: B023
        got = known[plan.winner, plan.best[plan.winner]]
        best = min(known.values(), key=lambda outcome: outcome.key)
        assert got.fits
        assert got.step_ns <= 1.03 * best.step_ns
        assert len(plan.tried) < len(table)


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
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "world_size", "on", "options"),
    [
        (3, 4, BOUND_BY_NETWORK, {"bucket": 0, "select_saved": True, "live_gradients": 1}),
        (2, 2, BOUND_BY_COMPUTE, {"bucket": 0, "prefetch": 1}),
        (2, 8, BOUND_BY_NETWORK, {"select_saved": True, "live_gradients": 2, "prefetch": 1}),
    ],
)
def test_a_plan_is_close_to_the_best(
    blocks: int, world_size: int, on: Machine, options: dict[str, Value]
) -> None:
    logical = mlp(blocks=blocks, dim=64, batch=64)
    require_close_to_the_best(planner(logical, on, world_size=world_size, **options))


def test_what_is_set_is_kept_and_the_rest_is_chosen() -> None:
    logical = mlp(blocks=2)
    free = regions(CompileOptions(world_size=4), logical)
    assert {(one.stage, one.mesh) for one in free} == {
        (0, None),
        *((stage, mesh) for stage in (1, 2, 3) for mesh in (None, "replicate=2,shard=2")),
    }
    (one,) = regions(CompileOptions(world_size=4, stage=3, mesh=None, prefetch=2), logical)
    names = {dimension.name for dimension in one.dimensions}
    assert names == {"select_saved", "recompute", "bucket", "live_gradients", "unshard"}
    found = planner(logical, BOUND_BY_NETWORK, world_size=4, stage=3, prefetch=2, mesh=None)
    options = found.options({"stage": 3, "mesh": None, "recompute": 1, "unshard": 1})
    assert (options.prefetch, options.recompute, options.unshard) == (
        2,
        ("blocks.0",),
        ("blocks.1",),
    )


def test_a_loser_is_told_why() -> None:
    logical = mlp(blocks=2, dim=64)
    fixed = {"world_size": 2, "bucket": 0, "live_gradients": 1, "prefetch": 0, "recompute": ()}
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
            assert "too many, most " in why
            assert "last_micro_step" in why or "of what rests there" in why


def test_where_nothing_fits_the_closest_is_named() -> None:
    with pytest.raises(UserError, match=r"Nothing fits 1\.0 kB: the closest is stage .* too many"):
        planner(mlp(blocks=2), BOUND_BY_COMPUTE, 1000, world_size=2, bucket=0).search()


def test_a_choice_in_words() -> None:
    settings: dict[str, Value] = {
        "stage": 0,
        "mesh": None,
        "select_saved": False,
        "recompute": 1,
        "bucket": 25_000_000,
        "prefetch": 0,
    }
    expected = "stage 0, no-select-saved, recompute 1 unit, buckets of 25.0 MB"
    assert words(settings) == expected


@pytest.mark.slow
def test_the_plan_is_what_compiling_with_its_options_makes() -> None:
    found = zeroir.plan(GPT, memory="24MB", world_size=4, stage=3, bucket=0, most_tried=20)
    assert found.chosen.needed_bytes <= found.budget_bytes == 24_000_000
    same = zeroir.compile(GPT, **found.compiled.options.model_dump())
    assert same.text() == found.compiled.text()
    assert same.report.laws["Z301"] == "proved"
    assert round(zeroir.simulate(same).step_s * 1e9) == found.chosen.step_ns
    assert found.bound_ns <= (found.chosen.step_ns or 0)
