"""``zeroir show``: the changes of passes, the program after each, and unfolded rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import zeroir as package
from tests.cli.conftest import Zeroir, assert_refused
from zeroir.ir.ops import op_name
from zeroir.ir.text import parse


def test_passes_are_accounted_for(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    """The ops that passes add and remove lead from the logical program to the scheduled one."""
    compiled = package.load(programs[3])
    rows = zeroir("show", programs[3], "--passes", "--json").json["passes"]
    assert [row["number"] for row in rows] == list(range(len(compiled.program.passes) + 1))
    assert tuple(row["spec"] for row in rows[1:]) == compiled.program.passes
    counts: dict[str, int] = {}
    for op in compiled.logical.step_ops():
        counts[op_name(type(op))] = counts.get(op_name(type(op)), 0) + 1
    for row in rows:
        for name, count in row["added"].items():
            counts[name] = counts.get(name, 0) + count
        for name, count in row["removed"].items():
            counts[name] -= count
        assert sum(counts.values()) == row["ops"]
    summary = compiled.summary()
    assert {name: count for name, count in counts.items() if count} == summary["ops"]
    assert rows[-1]["wire_bytes"] == sum(summary["collective_bytes"].values())
    assert rows[-1]["peak_bytes"] == sum(summary["peak_bytes_per_rank"].values())
    lines = zeroir("show", programs[3], "--passes").out.splitlines()
    assert len(lines) == len(rows) + 1
    for line, row in zip(lines[1:], rows, strict=True):
        assert row["spec"] in line
        assert all(f"+{count} {name}" in line for name, count in row["added"].items())


@pytest.mark.slow
def test_a_program_is_shown_after_any_pass(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    compiled = package.load(programs[3])
    last = len(compiled.program.passes)
    assert parse(zeroir("show", programs[3], "--pass", "0", "--text").out).passes == ()
    half = parse(zeroir("show", programs[3], "--pass", "2", "--text").out)
    assert half.passes == compiled.program.passes[:2]
    whole = zeroir("show", programs[3], "--pass", str(last), "--text").out
    assert whole == compiled.text()
    shown = zeroir("show", programs[3], "--pass", "2")
    assert shown.out.startswith(f"After pass 2: `{compiled.program.passes[1]}`.\n")
    assert "prefetch" not in shown.out.partition("last_micro_step\n")[2]
    assert_refused(
        zeroir("show", programs[3], "--pass", str(last + 1)), f"{last} passes made the program"
    )


@pytest.mark.slow
def test_rows_are_unfolded_where_that_is_asked_for(
    zeroir: Zeroir, programs: dict[int, Path]
) -> None:
    folded = zeroir("show", programs[3], "--section", "last_micro_step").out
    whole = zeroir("show", programs[3], "--section", "last_micro_step", "--unfold").out
    rows = zeroir("show", programs[3], "--section", "last_micro_step", "--json").json["schedule"]
    assert "⋮" in folded
    assert "⋮" not in whole
    numbers = [line.split()[0] for line in whole.partition("last_micro_step\n")[2].splitlines()[1:]]
    assert numbers == [str(row["line"]) for row in rows["last_micro_step"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--passes", "--text"], ["--passes", "--pass", "1"], ["--text", "--unfold"]]
)
def test_flags_that_do_not_go_together(
    zeroir: Zeroir, programs: dict[int, Path], flags: list[str]
) -> None:
    assert_refused(zeroir("show", programs[3], *flags), "can be combined")
