"""``zeroir run --trace`` on real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import GPT, Zeroir, assert_refused
from tests.cli.test_run import run
from tests.runtime.timelines import overlapping, require_program_order
from zeroir.api import load_program
from zeroir.artifact.outputs import MAGIC
from zeroir.cli.app import run_command
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE
from zeroir.ir.spans import Span


def timelines(trace: dict[str, Any]) -> list[list[Span]]:
    """Every rank's spans, as the trace shows them."""
    ranks: list[list[Span]] = [[] for _ in range(trace["otherData"]["ranks"])]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = round(1000 * event["ts"])
            end = start + round(1000 * event["dur"])
            place = event["args"]
            ranks[event["pid"]].append(Span(place["section"], place["index"], start, end))
    return ranks


@pytest.mark.slow
@pytest.mark.dist
def test_the_trace_has_the_ops_of_the_program(tmp_path: Path) -> None:
    """Observed order is the program's on every stream of every rank, and collectives run while segments compute."""
    assert run_command(["compile", GPT, "--world-size", "3", "-o", str(tmp_path / "gpt.zir")]) == 0
    arguments = ["--nproc", "3", "--steps", "2", "--json", "--trace", "trace.json", "--model", GPT]
    made = run("run", "gpt.zir", *arguments, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert [json.loads(line)["step"] for line in made.stdout.splitlines()] == [2]
    assert made.stderr.count("trace.json") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt.zir", "trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["step"] == 2
    program = load_program(tmp_path / "gpt.zir").program
    ranks = timelines(trace)
    assert len(ranks) == 3
    for spans in ranks:
        require_program_order(program, [LAST_MICRO_STEP, UPDATE], spans)
    # Of the whole step, on any rank: how much of it depends on what else the machine is doing.
    overlaps = [overlapping(program, spans) for spans in ranks]
    assert any(counts["prefetch"] > 0 for counts in overlaps), overlaps
    assert any(counts["reduce_scatter"] > 0 for counts in overlaps), overlaps


def test_a_timeline_that_cannot_be_written_is_refused_before_training(
    zeroir: Zeroir, tmp_path: Path
) -> None:
    program = tmp_path / "gpt.zir"
    program.write_bytes(MAGIC)
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "gone" / "trace.json", "there is no folder"),
        (program, "is a compiled program"),
    ):
        assert_refused(zeroir("run", str(program), "--trace", str(path)), reason)
