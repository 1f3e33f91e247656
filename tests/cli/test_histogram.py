"""The mean step of batches of many shapes, from a file, from rows and from the batches of a model file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice, product
from math import prod
from pathlib import Path
from statistics import fmean

import pytest
from torch.export import Dim

import zeroir as package
from examples import any_length
from tests.cli.conftest import Zeroir, assert_refused
from tests.cli.test_sizes_at import LENGTH, ROWS, Tagger, batch_of
from zeroir.api import CompiledProgram
from zeroir.cost.histogram import MOST_SIMULATED
from zeroir.memory.footprint import footprint
from zeroir.report.costs import format_seconds

ROWS_OF_HISTOGRAM = [
    {"length": 100, "rows": 2, "count": 3},
    {"length": 1500, "rows": 30, "count": 1},
    {"length": 600, "rows": 8, "count": 4},
]


def compiled(
    stage: int, micro_steps: int, mesh: str | None = None, order: str = "step"
) -> CompiledProgram:
    return package.compile(
        Tagger(),
        batch_of(3, 12),
        shapes=((ROWS, LENGTH), (ROWS, LENGTH)),
        stage=stage,
        micro_steps=package.MicroSteps(count=micro_steps, order=order),
        world_size=2 if mesh is None else 4,
        mesh=mesh,
    )


Draw = tuple[float, ...]
"""The seconds of two micro-steps of each rank, one rank after the other."""


def apart(draw: Draw) -> float:
    """The step of ranks that wait for each other at its end alone."""
    return max(fmean(draw[:2]), fmean(draw[2:]))


def together(draw: Draw) -> float:
    """The step of two ranks that gather parameters in each micro-step, so that they wait for each other there."""
    a, b, c, d = draw
    return fmean((max(a, c), max(b, d)))


def in_groups(draw: Draw) -> float:
    """The step of two groups of two ranks, which wait for all others at its end."""
    return max(together(draw[:4]), together(draw[4:]))


@pytest.mark.parametrize(
    ("stage", "mesh", "order", "step_of"),
    [
        (3, None, "step", together),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (0, None, "step", apart),
                (3, None, "layer", apart),
                (3, "replicate=2,shard=2", "step", in_groups),
            )
        ),
    ],
)
def test_a_mean_step_is_that_of_all_draws(
    stage: int, mesh: str | None, order: str, step_of: Callable[[Draw], float]
) -> None:
    program = compiled(stage, 2, mesh, order)
    mean = package.simulate_histogram(program, ROWS_OF_HISTOGRAM)
    steps: list[tuple[float, int]] = []
    for row in ROWS_OF_HISTOGRAM:
        at = {name: value for name, value in row.items() if name != "count"}
        steps.append((package.simulate(program, at=at).step_s, row["count"]))
    total = sum(count for _, count in steps)
    expected = sum(
        step_of(tuple(step for step, _ in draws)) * prod(count / total for _, count in draws)
        for draws in product(steps, repeat=4 if mesh is None else 8)
    )
    assert mean.mean_s == pytest.approx(expected, rel=1e-3)
    alone = sum(step * count for step, count in steps) / total
    assert mean.mean_s - mean.wait_s == pytest.approx(alone)
    assert mean.padded_s == package.simulate(program).step_s > mean.mean_s
    assert mean.peak_bytes == int(footprint(program.program).total_bytes)
    assert (mean.batches, mean.micro_steps, mean.simulated) == (8, 2, 3)
    assert sum(shape.share for shape in mean.shapes) == pytest.approx(1)


@pytest.mark.slow
def test_ranks_without_differences_do_not_wait() -> None:
    program = compiled(3, 1)
    alone = package.simulate_histogram(program, [{"length": 100, "count": 7}])
    at = package.simulate(program, at={"length": 100})
    assert alone.mean_s == pytest.approx(at.step_s)
    assert alone.wait_s == pytest.approx(0)
    one_micro_step = package.simulate_histogram(program, ROWS_OF_HISTOGRAM)
    assert one_micro_step.wait_s > 0


@pytest.mark.slow
def test_many_shapes_are_interpolated() -> None:
    program = compiled(3, 1)
    rows = [{"length": length} for length in range(2, 2049, 31)]
    mean = package.simulate_histogram(program, rows)
    assert len(mean.shapes) == len(rows) > MOST_SIMULATED >= mean.simulated
    for shape in mean.shapes[::8]:
        exact = package.simulate(program, at=shape.values).step_s
        assert shape.step_s == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_batches_of_the_model_file_are_measured(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "any.zir"
    package.compile("examples/any_length.py", stage=3, world_size=2).save(path)
    given = ("--histogram", "batches", "--model", "examples/any_length.py", "--json")
    measured = zeroir("simulate", path, *given).json
    shapes = Counter(
        tuple(batch["input_ids"].shape) for batch in islice(any_length.batches(0, 2, 0), 1000)
    )
    assert measured["batches"] == 1000
    assert {
        (shape["values"]["rows"], shape["values"]["length"]): round(shape["share"] * 1000)
        for shape in measured["shapes"]
    } == shapes
    answer = zeroir("simulate", path, *given[:-1])
    for words in ("mean step", "waiting", "padded", "memory", "were simulated"):
        assert words in answer.out


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "names of dims"),
        ("length,rows\n", "names of dims"),
        ("length,length\n4,4\n", "distinct names"),
        ("lenth\n4\n", "line 2: There is no dim 'lenth'"),
        ("length\n4\n4000\n", "line 3: length is 4000"),
        ("length,count\n4,0\n", "count is 0"),
        ("length,count\n4\n", "count is nothing"),
        ("length\n4,5\n", "a further column"),
        ("length\n-4\n", "length is '-4', but should be a whole number from 1 on"),
        ("length,count\n4,-3\n", "count is '-3', but should be a whole number from 1 on"),
        ('length\n"4\n', "no table in CSV"),
    ],
)
def test_files_that_are_no_histograms_are_refused(
    zeroir: Zeroir, any_zir: Path, tmp_path: Path, text: str, fact: str
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    assert_refused(zeroir("simulate", any_zir, "--histogram", path), fact)


def test_options_that_a_histogram_has_no_use_for_are_refused(
    zeroir: Zeroir, any_zir: Path, programs: dict[int, Path], tmp_path: Path
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length, rows\n4, 1\n")
    command = ("simulate", any_zir, "--histogram", path)
    assert zeroir(*command).exit_code == 0
    assert_refused(zeroir(*command, "--at", "rows=4"), "--at")
    assert_refused(zeroir(*command, "--straggler", "2"), "--straggler")
    assert_refused(zeroir(*command, "--allow-model-change"), "leave it out")
    assert_refused(zeroir("simulate", any_zir, "--model", "a.py"), "--histogram batches")
    assert_refused(zeroir("simulate", any_zir, "--histogram", "batches"), "no batches()")
    assert_refused(zeroir("simulate", any_zir, "--histogram", tmp_path / "none.csv"), "none.csv")
    assert_refused(zeroir("simulate", programs[3], "--histogram", path), "has no dims")


def test_a_table_of_a_spreadsheet_is_a_histogram(
    zeroir: Zeroir, any_zir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,rows,count\r\n4,1,2\r\n", encoding="utf-8-sig")
    measured = zeroir("simulate", any_zir, "--histogram", path, "--json").json
    assert (measured["batches"], measured["shapes"][0]["values"]) == (2, {"rows": 1, "length": 4})


@pytest.mark.slow
def test_a_dim_called_count_has_no_column() -> None:
    count, length = Dim("count", max=8), Dim("length", max=16)
    program = package.compile(Tagger(), batch_of(3, 12), shapes=((count, length), (count, length)))
    with pytest.raises(package.UserError, match=r"dim 'count'.*another name"):
        package.simulate_histogram(program, [{"length": 4, "count": 3}])


@pytest.fixture(scope="module")
def any_zir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("histogram") / "any.zir"
    compiled(3, 1).save(path)
    return path


@pytest.mark.slow
def test_a_plan_is_for_the_mean_sizes_and_says_the_mean_step(zeroir: Zeroir) -> None:
    given = {"batch": batch_of(3, 12), "shapes": ((ROWS, LENGTH), (ROWS, LENGTH)), "world_size": 2}
    plan = package.plan(Tagger(), "cpu-local", histogram=ROWS_OF_HISTOGRAM, most_tried=5, **given)  # type: ignore[arg-type]
    assert plan.at == {"length": 525, "rows": 9}
    expected = package.simulate_histogram(plan.compiled, ROWS_OF_HISTOGRAM, "cpu-local")
    assert plan.mean == expected
    assert plan.chosen.step_ns == round(
        package.simulate(plan.compiled, "cpu-local", at=plan.at).step_s * 1e9
    )
    answer = zeroir(
        *("plan", any_length.__file__, "--histogram", "batches", "--world-size", "2"),
        *("--machine", "cpu-local", "--most-tried", "3"),
    )
    assert answer.exit_code == 0, answer.err
    assert " over 1,000 batches of " in " ".join(answer.out.split())
    refused = zeroir("plan", any_length.__file__, "--histogram", "batches", "--at", "rows=1")
    assert_refused(refused, "cannot be combined with --at")


@pytest.mark.slow
def test_a_page_and_a_profile_say_the_mean_step(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path(any_length.__file__)
    assert zeroir("compile", source, "--world-size", "1", "-o", "any.zir").exit_code == 0
    Path("rows.csv").write_text("length,rows,count\n8,1,30\n64,6,10\n")
    page = zeroir("report", "any.zir", "--histogram", "rows.csv", "--machine", "cpu-local")
    mean = package.simulate_histogram("any.zir", Path("rows.csv"), "cpu-local")
    assert " ".join(page.out.split()).startswith(f"mean step {format_seconds(mean.mean_s)} over 40")
    answer = zeroir(
        *("profile", "any.zir", "-o", "here.toml", "--histogram", "rows.csv", "--rounds", "1"),
        *("--model", source),
    )
    assert answer.exit_code == 0, answer.err
    assert "batches    length 22, rows 3" in answer.out
    assert "mean step" in answer.out
    for command in (("report", "any.zir"), ("profile", "any.zir", "-o", "here.toml")):
        refused = zeroir(*command, "--histogram", "rows.csv", "--at", "rows=1")
        assert_refused(refused, "cannot be combined with --at")
