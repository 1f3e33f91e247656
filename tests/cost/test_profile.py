"""A machine that was measured predicts the steps that it was measured by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cli.conftest import GPT, Zeroir
from tests.cost.support import machine
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.zygote import run_forked
from zeroir.api import load_program
from zeroir.cost.durations import segment_cost
from zeroir.cost.machine import Machine, MeasuredSegment, load_machine, parse_machine, to_toml
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.cost.profile import Step, fit, measured_machine, typical
from zeroir.cost.simulate import Simulation, simulate
from zeroir.ir.program import Program
from zeroir.ir.spans import Span

SLOW = machine(
    node_ranks=64,
    flops_per_s=1e8,
    memory_bytes_per_s=1e9,
    launch_s=2e-6,
    node_bytes_per_s=5e8,
    node_latency_s=2e-5,
    computes=True,
)
BLANK = machine(node_ranks=64, computes=True)


PLAIN = Case(
    blocks=3,
    dim=16,
    precision="fp32",
    optimizer="adamw",
    micro_steps=1,
    clip=None,
    tied=False,
    keep_fp32=False,
    stage=0,
    world_size=2,
    elide=True,
    distance=1,
    live=2,
)


def recorded(simulated: Simulation) -> Step:
    """A simulated step as every rank would have recorded it."""
    by_rank = {
        rank: rank_class.spans for rank_class in simulated.classes for rank in rank_class.ranks
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def profiled(program: Program, truth: Machine) -> tuple[int, Simulation]:
    step = simulate(program, truth)
    measured = measured_machine(program, [recorded(step)] * 3, BLANK, name="measured")
    return step.step_ns, simulate(program, measured)


@examples(15)
@given(case=cases(world_sizes=(1, 3)))
def test_a_profile_of_a_simulated_step_predicts_that_step(case: Case) -> None:
    """On a machine that issues ops in no time, for the simulation does not tell when a wait was issued."""
    expected_ns, again = profiled(case.scheduled(), SLOW)
    assert again.step_ns == pytest.approx(expected_ns, rel=0.03)
    assert again.measured.segments == again.measured.of_segments
    assert again.measured.collectives == again.measured.of_collectives


@pytest.mark.parametrize("stage", range(4))
def test_the_issue_time_is_measured(stage: int) -> None:
    expected_ns, again = profiled(
        replace(PLAIN, stage=stage).scheduled(), load_machine("cpu-local")
    )
    assert again.step_ns == pytest.approx(expected_ns, rel=0.03)


def later(step: Step, rank: int, by_ns: int, *, name: str) -> Step:
    """The step, but on one rank the ops of that name begin earlier, as if it waited for the others."""
    moved = [
        Span(s.section, s.index, s.start_ns - by_ns, s.end_ns) if s.section == name else s
        for s in step[rank]
    ]
    return [moved if number == rank else spans for number, spans in enumerate(step)]


def test_steps_that_were_disturbed_do_not_count() -> None:
    program = PLAIN.scheduled()
    step = recorded(simulate(program, SLOW))
    slow = later(step, 0, 10**9, name="last_micro_step")
    assert list(typical([slow, step, step, step])) == [step, step]
    assert list(typical([slow])) == [slow]
    plain, among = (
        measured_machine(program, steps, BLANK, name="m")
        for steps in ([step], [step, slow, step, step])
    )
    assert simulate(program, plain).step_ns == simulate(program, among).step_ns


def test_waiting_for_a_late_rank_is_part_of_a_step() -> None:
    """One of two ranks takes 1.5 times as long: the step takes as long as on that rank, and not the mean."""
    program = PLAIN.scheduled()
    truth = simulate(program, SLOW, straggler=1.5)
    measured = measured_machine(program, [recorded(truth)], BLANK, name="m")
    # After the last collective nobody waits for anybody, so a little is missing.
    assert 0.9 <= simulate(program, measured).step_ns / truth.step_ns <= 1


def test_a_measured_machine_is_written_and_read(tmp_path: Path) -> None:
    program = PLAIN.scheduled()
    measured = measured_machine(program, [recorded(simulate(program, SLOW))], BLANK, name="here")
    again = parse_machine(to_toml(measured), "here.toml")
    assert again == measured
    assert simulate(program, again).step_ns == simulate(program, measured).step_ns
    path = tmp_path / "here.toml"
    path.write_text(to_toml(measured), encoding="utf-8")
    assert load_machine(path) == measured


@pytest.mark.slow
def test_workspaces_that_were_measured_count(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    here, budget = tmp_path / "here.toml", ("--budget", "1GB")
    program = load_program(programs[3]).program
    segments = {
        segment.digest(): MeasuredSegment(seconds=0, workspace_bytes=size, source="a step")
        for segment, size in zip(program.segments, (10**9, 7), strict=False)
    }
    here.write_text(to_toml(BLANK.model_copy(update={"segments": segments})))
    assert zeroir("verify", programs[3], *budget).exit_code == 0
    answer = zeroir("verify", programs[3], *budget, "--machine", here)
    assert answer.exit_code == 1
    assert "Z301" in answer.out
    for arguments, words in (
        ((*budget, "--machine", "dgx-h100"), "No workspaces were measured on 'dgx-h100'"),
        (("--machine", here), "give one with --budget"),
    ):
        answer = zeroir("verify", programs[3], *arguments)
        assert answer.exit_code == 2
        assert words in answer.err
    measured = with_measured_workspaces(program, load_machine(here))
    workspaces = [dict(segment.workspace_bytes).get("eager") for segment in measured.segments]
    own = [dict(segment.workspace_bytes).get("eager") for segment in program.segments]
    assert workspaces == [10**9, 7, *own[2:]]
    assert with_measured_workspaces(program, BLANK) is program


def test_a_second_profile_adds_to_the_first() -> None:
    first_program, second_program = (replace(PLAIN, dim=dim).scheduled() for dim in (8, 16))
    first = measured_machine(
        first_program, [recorded(simulate(first_program, SLOW))], BLANK, name="a"
    )
    both = measured_machine(
        second_program, [recorded(simulate(second_program, SLOW))], first, name="b"
    )
    assert set(first.segments) < set(both.segments)
    assert len(both.collectives) == len(first.collectives)
    assert len(both.ops) == len(first.ops)


def test_segments_that_no_profile_saw_are_compared_with_those_that_it_did() -> None:
    """On a machine that takes three times as long as is computed for it, those take three times as long, too."""
    base, truth = (
        machine(flops_per_s=rate * 1e9, memory_bytes_per_s=rate * 1e9, launch_s=3e-5 / rate)
        for rate in (3, 1)
    )
    first_program, second_program = (replace(PLAIN, dim=dim).scheduled() for dim in (8, 16))
    measured = measured_machine(
        first_program, [recorded(simulate(first_program, truth))], base, name="m"
    )
    assert parse_machine(to_toml(measured), "m.toml") == measured
    for segment in second_program.segments:
        assert segment.digest() not in measured.segments
        seconds = segment_cost(segment, truth).seconds
        assert segment_cost(segment, measured).seconds == pytest.approx(seconds, rel=1e-2)


@given(
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1e-3),
    sizes=st.lists(st.integers(1, 10**6), min_size=2, unique=True),
)
@example(alpha=1.0, beta=0.0, sizes=[1, 2])
def test_a_line_is_found_again(alpha: float, beta: float, sizes: list[int]) -> None:
    fitted = fit(sizes, [alpha + beta * size for size in sizes])
    for size in sizes:
        assert fitted[0] + fitted[1] * size == pytest.approx(
            alpha + beta * size, rel=1e-6, abs=1e-9
        )


def test_nothing_takes_less_than_no_time() -> None:
    assert fit([1, 2, 3], [3.0, 2.0, 1.0]) == (2.0, 0.0)
    alpha_s, beta = fit([10, 20, 40], [1.0, 4.0, 10.0])
    assert (alpha_s, beta > 0) == (0.0, True)
    assert fit([5, 5], [1.0, 2.0]) == (1.5, 0.0)


@pytest.mark.slow
@pytest.mark.dist
def test_a_profile_on_four_ranks_is_a_machine_to_simulate_on(
    zeroir: Zeroir, tmp_path: Path
) -> None:
    program, here = tmp_path / "gpt.zir", tmp_path / "here.toml"
    zeroir("compile", GPT, "--stage", "3", "--world-size", "4", "-o", program)
    arguments = [
        "profile",
        program.name,
        "--nproc",
        "4",
        "-o",
        here.name,
        "--rounds",
        "2",
        "--json",
        "--model",
        GPT,
        "--disk",
        str(tmp_path),
    ]
    made = run_forked("zeroir", arguments, tmp_path)
    assert made.returncode == 0, made.stderr
    profiled = json.loads(made.stdout)
    assert profiled["rounds"] == 2
    assert profiled["step_seconds"] > 0
    simulated = zeroir("simulate", program, "--machine", here, "--json").json
    assert simulated["step_seconds"] == pytest.approx(profiled["predicted_step_seconds"])
    measured = simulated["measured"]
    assert measured["segments"] == measured["of_segments"] == profiled["segments"]
    assert measured["collectives"] == measured["of_collectives"]
    described = load_machine(here)
    for figure in (described.host_link.to_device_bytes_per_s, described.disk.read_bytes_per_s):
        assert figure.source == "measured: 4 ranks at once"
    segments = described.segments.values()
    assert all(segment.workspace_bytes is not None for segment in segments)
    assert any(segment.workspace_bytes for segment in segments)
    # Other programs would be no use here; this only says that the order of magnitude is right.
    assert 0.2 < profiled["predicted_step_seconds"] / profiled["step_seconds"] < 2


def test_a_disk_is_measured_in_a_folder(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    answer = zeroir("profile", programs[3], "-o", "here.toml", "--disk", gone)
    assert answer.exit_code == 2
    assert f"'{gone}' is no folder" in answer.err


def test_a_machine_file_is_named_as_one(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    answer = zeroir("profile", programs[3], "-o", "here.zir")
    assert answer.exit_code == 2
    assert ".toml" in answer.err
