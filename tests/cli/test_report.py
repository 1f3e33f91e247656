"""``zeroir report``: one program, two, and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused


def test_a_trace_belongs_to_one_program(zeroir: Zeroir, tmp_path: Path) -> None:
    answer = zeroir("report", tmp_path / "a.zir", tmp_path / "b.zir", "--trace", tmp_path / "t")
    assert answer.exit_code == 2
    assert answer.err == (
        "Error: --trace can be combined only with one program: leave out the second one.\n"
    )


@pytest.mark.slow
def test_two_programs_and_traces(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bokeh")
    monkeypatch.chdir(tmp_path)
    budget = ("--memory-budget", "40MB")
    answer = zeroir("report", programs[2], programs[3], *budget, "--json")
    assert answer.json == {
        "path": "gpt2-gpt3.html",
        "machine": "dgx-h100",
        "memory_budget_bytes": 40_000_000,
        "other_memory_budget_bytes": 40_000_000,
        "at": {},
        "other_at": {},
    }
    page = (tmp_path / "gpt2-gpt3.html").read_text()
    assert "<i>A</i> gpt2.zir <i>B</i> gpt3.zir" in page
    assert zeroir("simulate", programs[3], "--trace", "trace.json").exit_code == 0
    for facts, reason in (
        ({}, "holds a step simulated on dgx-h100"),
        ({"machine": None, "program": "0" * 64}, "is a trace of another program"),
    ):
        trace = json.loads((tmp_path / "trace.json").read_text())
        trace["otherData"] |= facts
        (tmp_path / "trace.json").write_text(json.dumps(trace))
        assert_refused(
            zeroir("report", programs[3], "--trace", "trace.json", "-o", "traced.html"), reason
        )
        assert not (tmp_path / "traced.html").exists()
