"""``zeroir simulate`` and ``zeroir estimate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from zeroir.cost.machine import Machine, load_machine, to_toml
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP
from zeroir.report.costs import estimate_json


def test_a_step_is_simulated(zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    answer = zeroir("simulate", programs[3], "--machine", "dgx-h100", "--trace", trace)
    assert answer.exit_code == 0
    for word in (
        "step",
        "exposed communication",
        "MFU",
        "a rank",
        "gather",
        "critical path",
        "node link",
    ):
        assert word in answer.out
    assert all(line == line.rstrip() for line in answer.out.splitlines())
    assert str(trace) in answer.err
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"X", "M"}


@pytest.mark.slow
def test_a_simulation_as_json_is_the_apis(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    simulated = zeroir("simulate", programs[3], "--straggler", "1.5", "--json").json
    same = package.simulate(programs[3], straggler=1.5)
    assert simulated["step_seconds"] == same.step_s
    assert simulated["exposed_communication_seconds"] == same.exposed_s
    assert [
        (rank_class["first_rank"], rank_class["ranks"]) for rank_class in simulated["classes"]
    ] == [(0, 1), (1, 3)]
    path = simulated["critical_path"]
    assert sum(item["seconds"] for item in path) == pytest.approx(simulated["step_seconds"])
    assert (
        package.simulate(package.load(programs[3]), load_machine("dgx-h100"), straggler=1.5) == same
    )


@pytest.mark.slow
def test_measured_segments_are_counted(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    program = package.load(programs[3]).program
    plain = package.simulate(programs[3])
    assert plain.measured.segments == 0
    fields = load_machine("dgx-h100").model_dump()
    fields["segments"] = {
        segment.digest(): {"seconds": 1.0, "source": "made up"} for segment in program.segments
    }
    mine = tmp_path / "mine.toml"
    mine.write_text(to_toml(Machine.model_validate(fields)))
    simulated = zeroir("simulate", programs[3], "--machine", mine, "--json").json
    measured = simulated["measured"]
    assert measured["segments"] == measured["of_segments"] > 0
    assert measured["collectives"] == 0 < measured["of_collectives"]
    calls = sum(isinstance(op, ops.Compute) for op in program.section_by_name[LAST_MICRO_STEP].body)
    assert calls <= simulated["step_seconds"] < calls + 0.1
    assert "measured" in zeroir("simulate", programs[3], "--machine", mine).out


def test_a_machine_of_ones_own(zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path) -> None:
    text = to_toml(load_machine("cpu-local"))
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace('name = "cpu-local"', 'name = "mine"', 1))
    assert zeroir("simulate", programs[2], "--machine", mine, "--json").json["machine"] == "mine"
    mine.write_text(text.replace("latency_s", "lateness_s", 1))
    assert_refused(zeroir("simulate", programs[2], "--machine", mine), "node_link.lateness_s")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--machine", "abacus"], "choose 1xh100-pcie"),
        (["--straggler", "0.5"], "at least 1 times"),
        (["--straggler", "1e308"], "how slow the straggler is"),
        (["--micro-steps", "2"], "compile it with --micro-steps 2"),
        (["--micro-steps", "0"], "micro-steps"),
    ],
)
def test_impossible_simulations_are_refused(
    arguments: list[str], reason: str, zeroir: Zeroir, programs: dict[int, Path]
) -> None:
    assert_refused(zeroir("simulate", programs[2], *arguments), reason)


def test_a_timeline_never_replaces_the_program(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    assert_refused(
        zeroir("simulate", programs[2], "--trace", programs[2]),
        "is a compiled program: name another file to write, for instance trace.json",
    )


def test_the_headline_of_zero_is_printed(zeroir: Zeroir) -> None:
    answer = zeroir("estimate", "--params", "7.5e9", "--world-size", "64")
    assert answer.exit_code == 0
    for figure in ("120.0 GB", "31.4 GB", "16.6 GB", "1.9 GB", "2Ψ × 63/64", "3Ψ × 63/64"):
        assert figure in answer.out


def test_an_estimate_as_json_is_the_apis(zeroir: Zeroir) -> None:
    shape = ["--layers", "40", "--hidden", "4096", "--heads", "32", "--seq", "2048"]
    more = ["--batch", "8", "--recompute", "--offload", "optimizer", "--no-master"]
    estimated = zeroir("estimate", "--params", "7e9", *shape, *more, "--json").json
    same = package.estimate(
        7e9,
        layers=40,
        hidden=4096,
        heads=32,
        seq=2048,
        batch=8,
        recompute=True,
        offload="optimizer",
        master=False,
    )
    assert estimated["options"] == json.loads(json.dumps(estimate_json(same)))["options"]
    for row, stage in zip(estimated["stages"], same.stages, strict=True):
        assert row["total_bytes"] == stage.total_bytes
        assert row["host_bytes"] == stage.host_bytes > 0
    assert estimated["activations"]["layers_bytes"] == 8 * 2048 * 4096 * 40 * 2
    text = zeroir("estimate", "--params", "7e9", *shape, *more).out
    for word in ("whole units", "activations", "on the host", "one layer, recomputed"):
        assert word in text


def test_an_estimate_for_other_sizes_of_batches(zeroir: Zeroir, tmp_path: Path) -> None:
    rows = tmp_path / "lengths.csv"
    rows.write_text("seq,batch,count\n128,4,30\n1024,4,60\n2048,2,10\n")
    shape = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--seq", "2048"]
    command = ["estimate", "--params", "7e9", "--world-size", "64", *shape, "--batch", "4"]
    at = zeroir(*command, "--at", "seq=512").out
    assert "seq 512, batch 4" in at
    assert "slower ranks" not in at
    answer = zeroir(*command, "--offload", "activations", "--histogram", rows)
    for words in ("100 batches of 3 shapes", "28.6%", "3,021", "8,192", "copied for them"):
        assert words in answer.out
    found = zeroir(*command, "--histogram", rows, "--json").json["batches"]
    same = package.estimate(
        7e9, world_size=64, layers=32, hidden=4096, heads=32, seq=2048, batch=4, histogram=rows
    )
    assert found == json.loads(json.dumps(estimate_json(same)))["batches"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--params"),
        (["--params", "many"], "params"),
        (["--params", "0"], "--params is 0"),
        (["--params", "1e9", "--optimizer", "lamb"], "optimizer"),
        (["--params", "1e9", "--hidden", "8"], "activations need"),
    ],
)
def test_a_wrong_estimate_is_refused_in_a_sentence(
    arguments: list[str], reason: str, zeroir: Zeroir
) -> None:
    assert_refused(zeroir("estimate", *arguments), reason)


def test_the_api_refuses_unknown_options() -> None:
    wrong: dict[str, Any] = {"wings": 2}
    with pytest.raises(UserError, match="There is no keyword wings="):
        package.estimate(1e9, **wrong)
