"""Figures for batches of given sizes: those of a program that is compiled for these sizes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from zeroir.api import CompiledProgram
from zeroir.errors import UserError
from zeroir.memory.footprint import footprint
from zeroir.runtime.data.sized_batches import sized

ROWS, LENGTH = Dim("rows", max=64), Dim("length", min=2, max=2048)
ALIKE = package.MicroSteps(mean_over="batches")
"""Programs for one shape weight no batches by default."""
SMALL = {"rows": 5, "length": 300}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.hidden = nn.Linear(64, 64)
        self.tags = nn.Linear(64, 5)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        logits: Tensor = self.tags(torch.tanh(self.hidden(self.words(words))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())


def batch_of(rows: int, length: int) -> tuple[Tensor, Tensor]:
    words = torch.arange(rows * length).view(rows, length) % 100
    return words, words % 5


@pytest.fixture(scope="module")
def any_shape() -> CompiledProgram:
    """One program for all shapes."""
    shapes = ((ROWS, LENGTH), (ROWS, LENGTH))
    return package.compile(
        Tagger(), batch_of(3, 12), shapes=shapes, stage=3, world_size=4, micro_steps=ALIKE
    )


@pytest.mark.parametrize("values", [SMALL, {"rows": 64, "length": 2048}])
def test_a_simulation_at_sizes_is_that_of_a_program_for_these_alone(
    any_shape: CompiledProgram, values: dict[str, int]
) -> None:
    static = package.compile(Tagger(), batch_of(**values), stage=3, world_size=4, micro_steps=ALIKE)
    simulated = package.simulate(any_shape, at=values)
    alone = package.simulate(static)
    assert simulated.at == dict(sorted(values.items()))
    assert alone.at == {}
    assert (simulated.step_ns, simulated.flops, simulated.mfu, simulated.evaluation_s) == (
        alone.step_ns,
        alone.flops,
        alone.mfu,
        alone.evaluation_s,
    )
    # Memory stays that of the largest batches.
    assert simulated.peak_bytes == int(footprint(any_shape.program).total_bytes)
    assert alone.peak_bytes == footprint(static.program).total_bytes <= simulated.peak_bytes


def test_figures_are_for_the_largest_sizes_unless_others_are_given(
    any_shape: CompiledProgram,
) -> None:
    assert package.simulate(any_shape) == package.simulate(any_shape, at="length=2048, rows=64")
    assert package.simulate(any_shape, at="rows=5") == package.simulate(any_shape, at={"rows": 5})
    steps = [package.simulate(any_shape, at={"length": n}).step_ns for n in (2, 500, 2048)]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("at", "fact"),
    [
        ("lenth=4", "no dim 'lenth'; there is length from 2 to 2048, rows from 1 to 64"),
        ("length=1", "length is 1, but should be from 2 to 2048"),
        ("rows=65", "rows is 65"),
        ("rows=4,rows=4", "rows has two values"),
        ("rows", "'rows' is no value of a dim"),
        ("", "'' is no value"),
        ({"rows": 2.5}, "rows is 2.5, but should be a whole number"),
        ({"rows": True}, "rows is True"),
    ],
)
def test_other_sizes_are_refused(
    any_shape: CompiledProgram, at: dict[str, int] | str, fact: str
) -> None:
    with pytest.raises(UserError, match=fact.replace("'", ".")):
        package.simulate(any_shape, at=at)


def test_commands_say_for_which_sizes_their_figures_are(
    any_shape: CompiledProgram, zeroir: Zeroir, tmp_path: Path
) -> None:
    path, page = tmp_path / "any.zir", tmp_path / "any.html"
    any_shape.save(path)
    answer = zeroir("simulate", path, "--at", "length=300,rows=5")
    assert "length 300, rows 5" in answer.out
    assert "a rank, for the largest batches" in answer.out
    assert zeroir("simulate", path, "--at", "rows=5", "--json").json["at"] == {
        "length": 2048,
        "rows": 5,
    }
    assert_refused(zeroir("simulate", path, "--at", "rows=65"), "1 to 64")
    assert_refused(zeroir("profile", path, "--at", "rows=65", "-o", tmp_path / "a.toml"), "1 to 64")
    assert_refused(zeroir("report", path, "--at", "rows=65", "-o", page), "1 to 64")
    assert not page.exists()
    assert zeroir("report", path, "--at", "rows=5", "-o", page).exit_code == 0
    assert "any.zir at length 2,048, rows 5" in page.read_text()


def test_a_program_for_one_shape_has_no_other_sizes(
    zeroir: Zeroir, programs: dict[int, Path]
) -> None:
    answer = zeroir("simulate", programs[3], "--at", "length=4")
    assert_refused(answer, "has no dims", "--shapes")


def test_batches_are_cut_or_repeated_to_sizes(any_shape: CompiledProgram) -> None:
    values = {"rows": 4, "length": 7}
    larger = sized(any_shape.program, values, batch_of(6, 10))
    smaller = sized(any_shape.program, values, batch_of(2, 3))
    assert [tuple(tensor.shape) for tensor in (*larger, *smaller)] == [(4, 7)] * 4
    assert torch.equal(larger[0], batch_of(6, 10)[0][:4, :7])
    assert smaller[0][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert torch.equal(smaller[0][0], smaller[0][2])


@pytest.mark.slow
def test_a_plan_is_for_steps_at_sizes_and_the_memory_of_the_largest() -> None:
    shapes = ((ROWS, LENGTH), (ROWS, LENGTH))
    plans = [
        package.plan(
            Tagger(),
            batch=batch_of(3, 12),
            shapes=shapes,
            at=at,
            most_tried=3,
            stage=3,
            world_size=4,
        )
        for at in (None, SMALL)
    ]
    largest, small = (plan.chosen for plan in plans)
    assert largest.step_ns is not None
    assert small.step_ns is not None
    assert small.step_ns < largest.step_ns
    assert small.needed_bytes == largest.needed_bytes
    assert small.step_ns == package.simulate(plans[1].compiled, at=SMALL).step_ns
    assert plans[1].bound_ns <= small.step_ns


@pytest.mark.slow
def test_a_profile_measures_the_segments_of_its_sizes(zeroir: Zeroir, tmp_path: Path) -> None:
    path, machine = tmp_path / "any.zir", tmp_path / "here.toml"
    example = "examples/any_length.py"
    package.compile(example, stage=3, world_size=1).save(path)
    command = ("profile", path, "--rounds", "2", "-o", machine, "--model", example)
    assert zeroir(*command, "--at", "length=5,rows=2").exit_code == 0
    at = package.simulate(path, machine, at="length=5,rows=2")
    assert at.measured.segments == at.measured.of_segments
    assert package.simulate(path, machine).measured.segments == 0
    assert zeroir(*command).exit_code == 0
    largest = package.simulate(path, machine)
    assert largest.measured.segments == largest.measured.of_segments
    answer = zeroir("verify", path, "--budget", "80GB", "--machine", machine)
    assert answer.exit_code == 0
