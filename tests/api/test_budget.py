"""A budget of memory is law, and what is said where a program breaks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zeroir
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir import artifact as artifacts
from zeroir.api.compiling import load_program, load_unverified
from zeroir.api.search.budget import advice, alternatives
from zeroir.artifact import Artifact
from zeroir.config import CompileOptions, changed, make_options
from zeroir.config.offload_places import OFFLOADED
from zeroir.cost.machine import MeasuredSegment, load_machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.cost.simulate import simulate
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.passes.pipelines import for_options, lower
from zeroir.verify import VerificationError

LOGICAL = mlp(blocks=3, dim=32)
ELSEWHERE = OFFLOADED
"""All that can be offloaded."""


def options(**values: object) -> CompileOptions:
    return make_options({"stage": 0, "world_size": 4, **values})


def needed(**values: object) -> int:
    return footprint(made(**values)).total_bytes


def made(**values: object) -> Program:
    chosen = options(**values)
    program = replace(LOGICAL, options=chosen)
    return applied(program, for_options(chosen))


def saved(program: Program, path: Path) -> Path:
    artifacts.save(
        Artifact(
            logical=LOGICAL,
            scheduled=program,
            model_path="model.py",
            model_sha256="0" * 64,
            torch_version="2.13.0",
            zeroir_version=zeroir.__version__,
        ),
        path,
    )
    return path


def test_the_cheapest_options_that_fit_come_first_and_are_measured() -> None:
    budget = needed(stage=2)
    found = alternatives(LOGICAL, options(), budget)
    assert found[0].settings == {"stage": 2}
    assert len(found) == 3
    for one in found:
        assert one.needed_bytes == needed(**one.settings) <= budget
    assert "--stage 2 needs" in advice(LOGICAL, options(), budget)


def test_offloading_is_proposed_before_more_ranks() -> None:
    lean = {"stage": 3, "live_gradients": 1, "prefetch": 0, "recompute": ("*",)}
    found = alternatives(LOGICAL, options(**lean), needed(**lean) - 1)
    assert found[0].settings == {"offload": ("optimizer", "gradients")}
    assert all("world_size" not in one.settings for one in found)
    assert "--offload optimizer,gradients needs" in advice(
        LOGICAL, options(**lean), needed(**lean) - 1
    )


@pytest.mark.slow
def test_more_ranks_where_nothing_else_helps() -> None:
    lean = {"stage": 3, "live_gradients": 1, "prefetch": 0, "recompute": ("*",)}
    least = needed(**lean, offload=ELSEWHERE)
    (found,) = alternatives(LOGICAL, options(stage=3), least - 1)
    assert found.settings["world_size"] in (8, 16, 32, 64, 128, 256)
    said = advice(LOGICAL, options(), 1)
    assert said.startswith("No other options fit: the closest, --stage 3")


def test_what_needs_more_than_now_is_not_proposed() -> None:
    """Of one small matrix nothing is saved by more ranks, for which it is padded."""
    own = options(stage=3, live_gradients=1, prefetch=0, recompute=("*",), offload=ELSEWHERE)
    assert alternatives(mlp(blocks=1, dim=8), own, 1) == ()
    said = advice(mlp(blocks=1, dim=8), own, 1)
    assert said == "Use more ranks, a lower precision or a smaller batch."


ONE_UNIT = """
import torch
from torch import nn


def model():
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return ((x @ self.weight).relu() ** 2).mean()


def batch():
    return (torch.ones(512, 64),)
"""


def test_a_model_without_blocks_has_none_to_compute_again(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(ONE_UNIT)
    with pytest.raises(UserError, match=r"^Z301 (.|\n)*No other options fit: the closest, --"):
        zeroir.compile(model, stage=3, world_size=4, offload=zeroir.Offload(memory_budget="20kB"))


def test_every_proposal_is_accepted() -> None:
    for given in ({}, {"stage": 2, "live_gradients": 4}, {"stage": 3, "prefetch_budget": "1MB"}):
        before = options(**given)
        found = alternatives(LOGICAL, before, needed(**given) - 1)
        assert found
        for one in found:
            changed(before, **one.settings)


def test_computing_again_is_proposed_where_it_helps() -> None:
    bare = {"stage": 3, "live_gradients": 1, "prefetch": 0}
    again = {**bare, "recompute": ("*",)}
    assert needed(**again) < needed(**bare)
    (found, *_) = alternatives(LOGICAL, options(), needed(**bare) - 1)
    assert found.settings in ({"recompute": ("*",)}, again)
    assert "--recompute '*' needs" in advice(LOGICAL, options(), needed(**bare) - 1)


@pytest.mark.slow
def test_a_program_that_breaks_its_budget_is_refused_with_names(tmp_path: Path) -> None:
    program = lower(LOGICAL, options(memory_budget="64kB"))
    path = saved(program, tmp_path / "a.zir")
    with pytest.raises(VerificationError) as caught:
        load_program(path)
    text = str(caught.value)
    for words in ("Z301", "the budget is 64,000", "state ", "param ", "in unit ", "--stage "):
        assert words in text
    fitting = replace(program, options=options(memory_budget="80GB"))
    assert load_program(saved(fitting, tmp_path / "b.zir")).report.laws["Z301"] == "proved"
    # What is asked for now goes before what was asked for then.
    assert load_unverified(path, budget_bytes=10**9).report.is_valid


def test_proposals_count_the_workspaces_that_were_measured(tmp_path: Path) -> None:
    program = lower(LOGICAL, options())
    segments = {
        segment.digest(): MeasuredSegment(seconds=0, workspace_bytes=10**9, source="a step")
        for segment in program.segments
    }
    machine = load_machine("cpu-local").model_copy(update={"segments": segments})
    budget = footprint(with_measured_workspaces(made(stage=2), machine)).total_bytes
    found = alternatives(LOGICAL, options(), budget, machine)
    assert found[0].settings == {"stage": 2}
    assert all(10**9 < one.needed_bytes <= budget for one in found)
    path = saved(program, tmp_path / "a.zir")
    findings = load_unverified(path, budget_bytes=budget, machine=machine).report.findings
    (advised,) = (finding.advice for finding in findings if finding.code == "Z301")
    assert "--stage 2 needs 1.0 GB" in advised


def test_a_budget_that_is_no_amount() -> None:
    for name in ("memory_budget", "prefetch_budget"):
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(
            UserError, match=rf"^{flag} is lots, but should be an amount of memory, .*\.$"
        ):
            options(**{name: "lots"})


def test_on_a_machine_the_fastest_that_fits_comes_first() -> None:
    machine = load_machine("cpu-local")
    budget = needed(stage=2)
    found = alternatives(LOGICAL, options(), budget, machine)
    plain = alternatives(LOGICAL, options(), budget)
    assert [one.step_ns for one in plain] == [None] * 3
    assert {str(one.settings) for one in found} == {str(one.settings) for one in plain}
    steps = [simulate(made(**one.settings), machine).step_ns for one in found]
    assert steps == [one.step_ns for one in found] == sorted(steps)
    said = advice(LOGICAL, options(), budget, machine)
    assert said.startswith(f"Compile with other options (steps simulated on {machine.name}): --")
    assert " a step" in said


@pytest.mark.slow
def test_no_more_ranks_are_proposed_than_a_machine_takes() -> None:
    machine = load_machine("cpu-local")
    (closest,) = alternatives(LOGICAL, options(), 1, machine)
    world_size = closest.settings["world_size"]
    assert isinstance(world_size, int)
    assert 4 < world_size <= machine.node_ranks
