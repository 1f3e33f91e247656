"""The tables of the terminal: the same words with colours and without."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from tests.passes.test_gates import gate, gate_logical
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.schedules import Case
from zeroir.config.offload import Offload
from zeroir.cost.estimate import estimate
from zeroir.cost.estimate_options import EstimateOptions
from zeroir.errors import UserError
from zeroir.passes.manager import run
from zeroir.report.costs import render_estimate
from zeroir.report.passes import pass_rows, programs_after_passes
from zeroir.report.render import render_passes, render_schedule, render_summary
from zeroir.report.summary import summarise
from zeroir.verify import verify

CASE = Case(stage=3, ranks=3, blocks=4)


def printed(what: RenderableType, *, is_coloured: bool, width: int = 10_000) -> str:
    sink = StringIO()
    Console(
        file=sink,
        width=width,
        force_terminal=is_coloured,
        color_system="standard" if is_coloured else None,
        highlight=False,
    ).print(what)
    return sink.getvalue()


def without_colours(text: str) -> str:
    return "\n".join(Text.from_ansi(line).plain.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", ["schedule", "passes"])
def test_colours_change_no_word(name: str) -> None:
    program = applied(CASE.logical, for_stage(3, 3))
    what = (
        render_schedule(program)
        if name == "schedule"
        else render_passes(pass_rows(programs_after_passes(CASE.logical, program)))
    )
    plain, coloured = (printed(what, is_coloured=flag) for flag in (False, True))
    assert "\x1b[" not in plain
    assert coloured.count("\x1b[") > 50
    assert without_colours(coloured) == "\n".join(line.rstrip() for line in plain.splitlines())


def test_a_program_that_other_passes_made_is_not_explained() -> None:
    program = run(CASE.logical, for_stage(3, 3))
    changed = replace(program, reports=())
    with pytest.raises(UserError, match="compile the model again"):
        programs_after_passes(CASE.logical, changed)


def test_stages_0_to_2_send_as_much() -> None:
    """2Ψ, an all-reduce being a reduce-scatter and an all-gather, in the summary and after each pass."""
    summaries, rows = [], []
    programs = [run(CASE.logical, for_stage(stage, 3)) for stage in (0, 1, 2)]
    for stage, program in enumerate(programs):
        summary = summarise(program, verify(program), stage=stage, precision="fp32")
        (line,) = [
            line
            for line in printed(render_summary(summary), is_coloured=False).splitlines()
            if line.startswith("on the wire")
        ]
        summaries.append(line.split(" (")[0])
        rows.append(pass_rows(programs_after_passes(CASE.logical, program))[-1].wire_bytes)
    assert len(set(summaries)) == 1
    full = sum(flat.padded_numel * flat.dtype.itemsize_bytes for flat in programs[0].flats)
    assert [count // full for count in rows] == [2, 2, 2]
    assert max(rows) - min(rows) < 64  # scalars


@pytest.mark.parametrize(("micro_steps", "expected"), [(1, " per step"), (2, " of one micro-step")])
def test_bytes_on_the_wire_are_those_of_one_micro_step(micro_steps: int, expected: str) -> None:
    program = run(mlp(micro_steps=micro_steps), for_stage(2, 3))
    summary = summarise(program, verify(program), stage=2, precision="fp32")
    lines = printed(render_summary(summary), is_coloured=False).splitlines()
    assert [line.endswith(expected) for line in lines if line.startswith("on the wire")] == [True]


def test_what_is_outside_the_device_is_shown_with_its_traffic() -> None:
    """The gradient's shards of both flats go down in BF16, and the parameters' come up."""
    program, logical = gate("offload"), gate_logical("offload")
    summary = summarise(program, verify(program, logical), stage=2, precision="bf16")
    numel = sum(flat.padded_numel for flat in program.flats) // 2
    assert summary["transfer_bytes"]["to_host"] == summary["transfer_bytes"]["to_device"]
    assert summary["transfer_bytes"]["to_host"] == 2 * numel
    outside = summary["outside_bytes_per_rank"]
    assert outside["host"]["resting"]["master"] == outside["host"]["resting"]["state"] == 4 * numel
    assert outside["host"]["block"] > 0
    assert outside["disk"] == {"resting": {}, "block": 0}
    lines = printed(render_summary(summary), is_coloured=False).splitlines()
    shown = {line.split("  ")[0] for line in lines}
    assert {"on the host", "staging", "transfers"} <= shown
    assert summary["staging_bytes_per_rank"] == {"host": outside["host"]["block"]}
    assert "on the disk" not in shown
    plain = summarise(logical, verify(logical), stage=0, precision="bf16")
    printed_plain = printed(render_summary(plain), is_coloured=False)
    assert "on the host" not in printed_plain
    assert "staging" not in printed_plain


def test_an_estimate_fits_a_terminal() -> None:
    """In 80 columns nothing is cut off and no row is folded."""
    options = EstimateOptions(
        params=7.5e9,
        world_size=64,
        layers=40,
        hidden=4096,
        heads=32,
        seq=2048,
        batch=64,
        vocab=50_000,
        recompute=True,
        offload=Offload(what=("optimizer", "parameters", "activations"), to="disk"),
    )
    wide = printed(render_estimate(estimate(options)), is_coloured=False)
    assert all(len(line) <= 80 and line == line.rstrip() for line in wide.splitlines())
    for words in (
        "memory of a rank",
        "beside the model states",
        "whole units",
        "on the host",
        "on disk",
    ):
        assert words in wide
    # A table that is too wide for its console would be folded, or cut off with an ellipsis.
    assert printed(render_estimate(estimate(options)), is_coloured=False, width=80) == wide


def test_an_estimate_says_that_states_have_8_bits() -> None:
    options = EstimateOptions(params=1e9, optimizer_bits=8)
    text = printed(render_estimate(estimate(options)), is_coloured=False)
    assert "2 numbers of 8 bits a parameter, and the FP32 master weight" in text
    assert "2 + 2 + 6.031 bytes" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "live", "expected"),
    [
        (1_000, 1_000, "one block of 1.0 kB, equal to the most bytes live at once"),
        (1_012, 1_000, "one block of 1.0 kB, 1.20% more than the most bytes live at once"),
        (0, 0, ""),
    ],
)
def test_the_gap_of_the_plan_is_shown(block: int, live: int, expected: str) -> None:
    program = run(CASE.logical, for_stage(3, 3))
    summary = summarise(program, verify(program), stage=3, precision="fp32")
    summary["temporary_bytes_per_rank"] = {"block": block, "live": live}
    lines = printed(render_summary(summary), is_coloured=False).splitlines()
    (line,) = [line for line in lines if line.startswith("temporary")] or [""]
    assert line.removeprefix("temporary").strip() == expected
