"""Estimates for batches of other sizes than the largest: means, and the wait of ranks that draw their own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import zeroir as package
from zeroir.cost.estimate import Estimate
from zeroir.errors import UserError

ROWS = (
    {"seq": 128, "batch": 4, "count": 3},
    {"seq": 1024, "batch": 4, "count": 6},
    {"seq": 2048, "batch": 2, "count": 1},
)


def of(**more: object) -> Estimate:
    given: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "batch": 4}
    return package.estimate(7e9, **{"offload": "activations", **given, **more})


def test_figures_of_a_histogram_are_means_of_estimates_for_each_of_its_shapes() -> None:
    drawn = [row for row in ROWS for _ in range(row["count"])]
    apart = [of(seq=row["seq"], batch=row["batch"]) for row in drawn]
    found = of(histogram=ROWS)
    batches = found.batches
    assert batches is not None
    assert (batches.batches, batches.shapes) == (10, 3)
    assert batches.tokens == fmean(row["seq"] * row["batch"] for row in drawn)
    kept = [each.activations.total_bytes for each in apart if each.activations is not None]
    assert batches.activations_bytes == pytest.approx(fmean(kept))
    for number, moved in enumerate(batches.moved):
        assert moved.to_host == pytest.approx(
            fmean(each.stages[number].moved.to_host for each in apart), abs=1
        )
    largest = [each.activations.total_bytes for each in (of(),) if each.activations is not None]
    # Memory is that of the largest batch, and nothing else changes.
    assert found.stages == of().stages
    assert batches.largest_activations_bytes == max([*kept, *largest])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_wait_is_that_of_all_draws(world_size: int) -> None:
    def flops(row: dict[str, int]) -> float:
        return (6 * 7e9 + 12 * 32 * 4096 * row["seq"]) * row["seq"] * row["batch"]

    drawn = [flops(row) for row in ROWS for _ in range(row["count"])]
    mean, slowest = fmean(drawn), fmean(max(draw) for draw in product(drawn, repeat=world_size))
    batches = of(histogram=ROWS, world_size=world_size).batches
    assert batches is not None
    assert batches.flops == pytest.approx(mean)
    assert batches.wait_share == pytest.approx(1 - mean / slowest, abs=1e-12)


def test_sizes_at_are_a_histogram_of_one_shape_and_the_others_the_largest() -> None:
    assert of(at={"seq": 512}) == of(at="seq=512") == of(histogram=[{"seq": 512, "batch": 4}])
    at = of(at={"seq": 512}).batches
    assert at is not None
    assert at.sizes == {"seq": 512, "batch": 4}
    assert at.wait_share == 0


def test_recomputation_takes_a_fourth_pass() -> None:
    found = [of(at={"seq": 512}, recompute=value, offload="").batches for value in (False, True)]
    plain, again = (batches.flops for batches in found if batches is not None)
    assert again == pytest.approx(plain * 4 / 3)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"at": {"seq": 4096}}, "seq is 4096, but should be from 1 to 2048"),
        ({"at": {"length": 1}}, "There is no dim 'length'; there is seq from 1 to 2048"),
        ({"at": "seq=1", "histogram": ROWS}, "cannot be combined with --at"),
        ({"histogram": "batches"}, "columns seq, batch and count"),
        ({"histogram": []}, "has no rows"),
        ({"histogram": "none.csv"}, "'none.csv' cannot be read"),
    ],
)
def test_wrong_sizes_are_refused(
    given: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        of(**given)


def test_without_the_shape_of_a_layer_there_are_no_batches() -> None:
    with pytest.raises(UserError, match="--layers, --hidden, --heads and --seq"):
        package.estimate(7e9, at={"seq": 512})
