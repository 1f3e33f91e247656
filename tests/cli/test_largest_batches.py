"""The largest batches that fit a memory: a program for these sizes fits, and one for larger sizes does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from tests.cli.test_bad_input import LINE
from tests.cli.test_sizes_at import Tagger, batch_of
from zeroir.api.capture import capture_source, given_source
from zeroir.api.search.candidates import CandidateMeasurer
from zeroir.api.search.largest_batches import largest_batches, narrowed_capture
from zeroir.config import CompileOptions, make_options
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint

ROWS, LENGTH = 64, 32
EXAMPLE = "examples/any_length.py"


def options_for(sizes: Mapping[str, int]) -> CompileOptions:
    rows, length = sizes["rows"], sizes["length"]
    shapes = f"0: rows<={rows}, 2<=length<={length}; 1: rows, length"
    return make_options({"shapes": shapes, "stage": 3, "world_size": 2, "bucket": 0})


def captured(sizes: Mapping[str, int]) -> Program:
    source = given_source(Tagger(), batch_of(3, 4), None, None)
    return capture_source(source, options_for(sizes)).artifact.logical


def bytes_of(sizes: Mapping[str, int]) -> int:
    options = options_for(sizes)
    compiled = package.compile(
        Tagger(),
        batch_of(3, 4),
        shapes=options.shapes,
        stage=3,
        world_size=2,
        communication=package.Communication(bucket=0),
    )
    return int(footprint(compiled.program).total_bytes)


@pytest.fixture(scope="module")
def wide() -> Program:
    return captured({"rows": ROWS, "length": LENGTH})


@pytest.mark.slow
def test_a_narrowed_program_is_that_of_a_capture_for_fewer_sizes(wide: Program) -> None:
    fewer = {"rows": 10, "length": 7}
    assert narrowed_capture(wide, fewer) == captured(fewer)
    assert narrowed_capture(wide, {}) == wide
    (length,) = narrowed_capture(wide, {"rows": 1}).dims
    assert (length.name, length.maximum) == ("length", LENGTH)


@pytest.mark.slow
def test_larger_batches_than_the_largest_do_not_fit(wide: Program) -> None:
    options = options_for({"rows": ROWS, "length": LENGTH})
    budget = bytes_of({"rows": 20, "length": LENGTH}) + 1000

    def needed_bytes(program: Program) -> int | None:
        measured, outcome = CandidateMeasurer(program, options, budget, None).measure({})
        return int(measured.needed_bytes) if outcome.fits else None

    found = largest_batches(wide, needed_bytes, budget)
    first, *others, last = found.limits
    assert first.sizes == {"rows": 20, "length": LENGTH}
    assert others
    assert last.sizes["rows"] == ROWS
    for limit in found.limits:
        searched = "length" if limit is last else "rows"
        assert bytes_of(limit.sizes) == limit.needed_bytes <= budget
        assert bytes_of({**limit.sizes, searched: limit.sizes[searched] + 1}) > budget
    assert found.elements == min(limit.elements for limit in found.limits)
    assert str(found).startswith(f"rows × length ≤ {found.elements} fits ")


def fits(program: Program, longest: int, elements: int) -> int | None:
    rows, length = (int(size) for size in program.inputs[0].shape)
    return 1 if length <= longest and rows * length <= elements else None


def test_memory_for_all_or_for_no_batches_is_said(wide: Program) -> None:
    everything = largest_batches(wide, lambda _: 1, 10**6)
    assert str(everything) == "rows × length ≤ 2,048 fits 1.0 MB, all that the shapes allow"
    assert everything.narrowed(wide) == wide
    # If not even one row of the longest fits, shorter ones may, with as many rows as fit beside them.
    shorter = largest_batches(wide, lambda program: fits(program, longest=5, elements=10**6), 1000)
    assert [dict(limit.sizes) for limit in shorter.limits] == [{"rows": ROWS, "length": 5}]
    assert str(shorter) == f"rows ≤ {ROWS}, length ≤ 5 fits 1.0 kB"
    fewer = largest_batches(wide, lambda program: fits(program, longest=20, elements=100), 1000)
    assert [tuple(limit.sizes.values()) for limit in fewer.limits] == [
        (5, 20),
        (10, 10),
        (20, 5),
        (50, 2),
    ]
    assert str(fewer) == "rows ≤ 5, length ≤ 20 fits 1.0 kB"
    with pytest.raises(UserError, match=r"smallest batches \(rows 1, length 2\)"):
        largest_batches(wide, lambda _: None, 10**6)


@pytest.mark.slow
def test_a_plan_is_for_the_largest_batches_that_fit(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "best.zir"
    command = ["plan", EXAMPLE, "--machine", "cpu-local", "--world-size", "2", "--stage", "3"]
    command += ["--most-tried", "12", "--memory", "700kB", "-o", str(path)]
    assert_refused(zeroir(*command), "Nothing fits 700.0 kB", "--largest-batch")
    assert not path.exists()
    # The blocks of docs/shapes.md say what is printed without --json.
    planned = zeroir(*command, "--largest-batch", "--json").json["largest_batches"]
    compiled = package.load(path)
    assert {dim.name: dim.maximum for dim in compiled.program.dims} == planned["limits"][0]["sizes"]
    assert footprint(compiled.program).total_bytes <= 700_000
    # The program is what a compilation with these shapes and options is.
    assert (
        package.compile(EXAMPLE, shapes=compiled.options.shapes).program.dims
        == compiled.program.dims
    )
    verified = zeroir("verify", path, "--budget", "700kB")
    assert verified.exit_code == 0


def test_a_model_without_dims_has_no_largest_batch(zeroir: Zeroir, tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(LINE)
    answer = zeroir("plan", tmp_path / "line.py", "--largest-batch")
    assert_refused(answer, "has no dims", "--shapes")
