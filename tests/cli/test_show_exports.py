"""``zeroir export`` and ``zeroir report`` as a user meets them."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from tests.report.torch_judges import flight_recorder_verdicts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chrome", "memory-snapshot", "graphviz"])
def test_one_file_is_written(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "out"
    answer = zeroir("export", programs[3], "--format", kind, "-o", path)
    assert (answer.exit_code, answer.err) == (0, "")
    assert answer.out == f"Wrote {path}.\n"
    assert path.stat().st_size > 1000
    again = zeroir("export", programs[3], "--format", kind, "-o", path, "--json").json
    assert again == {"format": kind, "paths": [str(path)]}


def test_the_simulated_step_as_a_trace(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    chosen = ["--format", "chrome", "--machine", "dgx-a100-80g", "-o", path]
    assert zeroir("export", programs[3], *chosen).exit_code == 0
    trace: dict[str, Any] = json.loads(path.read_text())
    assert trace["otherData"]["machine"] == "dgx-a100-80g"
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    program = package.load(programs[3]).program
    assert len(ops) == sum(1 for _ in program.step_ops())
    (name,) = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert name == "rank 0 and 3 alike"


@pytest.mark.slow
def test_a_folder_of_dumps_that_torch_finds_consistent(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "dumps"
    answer = zeroir("export", programs[3], "--format", "flight-recorder", "-o", folder)
    assert answer.exit_code == 0, answer.err
    assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank}" for rank in range(4)]
    verdicts = flight_recorder_verdicts(folder)
    assert verdicts
    assert all(verdicts)
    assert_refused(
        zeroir("export", programs[3], "--format", "flight-recorder", "-o", folder),
        "is not an empty folder",
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False])
def test_a_disk_that_is_full_leaves_no_dumps_of_some_ranks(
    zeroir: Zeroir,
    programs: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_new: bool,
) -> None:
    folder = tmp_path / "dumps"
    if not is_new:
        folder.mkdir()
    synced: list[int] = []

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)
    assert_refused(
        zeroir("export", programs[3], "--format", "flight-recorder", "-o", folder),
        "No space left on device",
    )
    assert list(tmp_path.rglob("*")) == ([] if is_new else [folder])


@pytest.mark.parametrize("command", ["export", "report"])
def test_no_program_is_overwritten(zeroir: Zeroir, programs: dict[int, Path], command: str) -> None:
    flags = ["--format", "graphviz"] if command == "export" else []
    for there in (programs[3], programs[2]):
        before = there.read_bytes()
        assert_refused(
            zeroir(command, programs[3], *flags, "-o", there),
            "is a compiled program: name another file to write",
        )
        assert there.read_bytes() == before


def test_options_that_conflict_are_refused(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    chosen = ["--format", "memory-snapshot", "--section", "update", "-o", tmp_path / "x"]
    assert_refused(zeroir("export", programs[3], *chosen), "only with --format graphviz")
    chosen = ["--format", "memory-snapshot", "--machine", "dgx-h100", "-o", tmp_path / "x"]
    assert_refused(zeroir("export", programs[3], *chosen), "only with --format chrome")
    assert_refused(
        zeroir("report", programs[3], "--machine", "abacus", "-o", tmp_path / "x.html"), "abacus"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_report_is_one_page(zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path) -> None:
    path = tmp_path / "gpt.html"
    answer = zeroir("report", programs[3], "-o", path, "--memory-budget", "20MB", "--json")
    assert answer.exit_code == 0, answer.err
    assert answer.json == {
        "path": str(path),
        "machine": "dgx-h100",
        "memory_budget_bytes": 20_000_000,
        "at": {},
    }
    page = path.read_text()
    assert "fp32</b>" in page
    assert 'class="tile bad"' in page  # the peak is above this budget


def test_without_its_library_a_report_names_the_package(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert_refused(
        zeroir("report", programs[3], "-o", tmp_path / "gpt.html"), "pip install 'zeroir[report]'"
    )
