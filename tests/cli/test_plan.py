"""``zeroir plan``: its answer, its file, and the input that it refuses with a sentence."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from pydantic_core import to_jsonable_python
from rich.console import Console

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from zeroir.api import CompiledProgram
from zeroir.api.search.candidates import Candidate
from zeroir.api.search.plan import Plan
from zeroir.api.search.planner import Alternative
from zeroir.cli.render_plan import render_plan
from zeroir.cost.simulate import Measured

MODEL = """
import torch
from torch import nn


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def model():
    return Chain()


def batch():
    return (torch.ones(8, 32),)
"""
FIXED = ("--world-size", "4", "--stage", "3", "--bucket", "0", "--live-gradients", "2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "chain.py"
    path.write_text(MODEL)
    return path


@pytest.mark.slow
def test_the_plan_as_json_is_that_of_the_program_that_it_writes(
    zeroir: Zeroir, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "best.zir"
    arguments = [*FIXED, "--memory", "1MB", "--most-tried", "8"]
    answer = zeroir("plan", model, *arguments, "--json", "-o", path)
    assert answer.exit_code == 0, answer.err
    planned = answer.json
    assert planned["path"] == str(path)
    assert (planned["machine"], planned["world_size"], planned["memory_bytes"]) == (
        "dgx-h100",
        4,
        10**6,
    )
    assert 3 <= planned["tried"] <= 8 < planned["choices"]
    assert planned["is_finished"] is False
    chosen = planned["chosen"]
    assert 0 < planned["bound_seconds"] <= chosen["step_seconds"]
    assert 0 < chosen["needed_bytes"] <= 10**6
    assert 0 < sum(chosen["critical_path"].values()) <= 1.001
    assert chosen["measured"]["segments"] == 0 < chosen["measured"]["of_segments"]
    assert planned["alternatives"]
    for alternative in planned["alternatives"]:
        assert alternative["why"]
        assert (
            alternative["step_seconds"] is None
            or alternative["step_seconds"] >= chosen["step_seconds"]
        )
    assert zeroir("verify", path).exit_code == 0
    written = package.load(path)
    assert to_jsonable_python(written.options.flat) == planned["options"]
    assert written.options.offload.memory_budget == "1000000"
    for name in ("stage", "recompute", "unshard", "select_saved"):
        assert planned["options"][name] == chosen["settings"][name]


@pytest.mark.slow
def test_the_plan_in_words(zeroir: Zeroir, model: Path, tmp_path: Path) -> None:
    answer = zeroir("plan", model, *FIXED, "--most-tried", "4", "--machine", "dgx-a100-80g")
    assert answer.exit_code == 0, answer.err
    for words in (
        "dgx-a100-80g, 4 ranks",
        "80.0 GB a rank",
        "tried            4 of",
        "the allowed number",
        "chosen           stage 3, ",
        "no choice below",
        "what lost",
    ):
        assert words in answer.out
    assert list(tmp_path.glob("*.zir")) == []


@pytest.mark.slow
def test_where_nothing_fits_nothing_is_written(zeroir: Zeroir, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "best.zir"
    answer = zeroir("plan", model, *FIXED, "--memory", "1kB", "-o", path)
    assert_refused(
        answer,
        "Nothing fits 1.0 kB: the persistent buffers of a rank",
        "at least, at stage 3",
        "more ranks",
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machine", "abacus"], ["abacus", "choose 1xh100-pcie"]),
        (["--memory", "lots"], ["'lots'", "80GB"]),
        (["--most-tried", "0"], ["--most-tried", "0"]),
        (["--stage", "7"], ["--stage is 7"]),
        (["--stage", "1", "--prefetch", "2"], ["--prefetch 2 needs --stage 3"]),
        (["--prefetch", "2", "--prefetch-budget", "1GB"], ["--prefetch 2 and --prefetch-budget"]),
        (["--memory", "1GB", "--memory-budget", "2GB"], ["--memory and --memory-budget"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["-o", "no/folder/x.zir"], ["no/folder"]),
        (["-o", "."], ["is a folder"]),
        (["-o", "chain.py"], ["chain.py", "is not a compiled program"]),
    ],
)
def test_wrong_input_is_reported_before_the_model_is_loaded(
    zeroir: Zeroir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "raise AssertionError('the model was loaded')\n"
    Path("chain.py").write_text(source)
    assert_refused(zeroir("plan", "chain.py", "--world-size", "2", *arguments), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["chain.py"]
    assert Path("chain.py").read_text() == source


def test_a_model_that_is_not_there(zeroir: Zeroir, tmp_path: Path) -> None:
    assert_refused(zeroir("plan", tmp_path / "none.py", "--world-size", "2"), "none.py")
    assert_refused(zeroir("plan"), "MODEL is missing", "zeroir plan --help")


def test_no_word_of_a_plan_is_cut_off() -> None:
    place = "a/long/path/without/a/blank/" * 4 + "model.py:119"
    candidate = Candidate(
        settings={"stage": 3, "mesh": None},
        needed_bytes=2,
        resting_bytes=1,
        culprit=place,
        step_ns=1000,
        exposed_ns=0,
        bounded_by=(("the segments", 1.0),),
        measured=Measured(segments=3, of_segments=5, collectives=0, of_collectives=1),
    )
    plan = Plan(
        compiled=cast(CompiledProgram, None),  # not for the eye
        machine="here",
        world_size=2,
        budget_bytes=2,
        chosen=candidate,
        alternatives=(Alternative(candidate=candidate, why=place),),
        tried=2,
        choices=2,
        bound_ns=500,
        at={},
        is_finished=True,
    )
    sink = StringIO()
    Console(file=sink, width=80).print(render_plan(plan))
    assert all(len(line) <= 80 and line == line.rstrip() for line in sink.getvalue().splitlines())
    assert "".join(sink.getvalue().split()).count(place) == 2
    assert "3 of 5 segments, 0 of 1 collective\n" in sink.getvalue()
