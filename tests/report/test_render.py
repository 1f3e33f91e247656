"""What the terminal shows: the same words with colours and without."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from tests.support.lowering import applied
from tests.support.schedules import Case
from zeroir.errors import UserError
from zeroir.ir.verify import verify
from zeroir.passes.manager import run
from zeroir.passes.pipelines import for_stage
from zeroir.report.passes import pass_rows, programs_after_passes
from zeroir.report.render import render_passes, render_schedule, render_summary
from zeroir.report.summary import summarise

CASE = Case(stage=3, ranks=3, blocks=4)


def printed(what: RenderableType, *, is_coloured: bool) -> str:
    sink = StringIO()
    Console(
        file=sink,
        width=10_000,
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
    other = replace(program, loss=None)
    with pytest.raises(UserError, match="compile the model again"):
        programs_after_passes(CASE.logical, other)


@pytest.mark.parametrize(
    ("block", "live", "said"),
    [
        (1_000, 1_000, "one block of 1.0 kB, as much as can be live at once"),
        (1_012, 1_000, "one block of 1.0 kB, 1.20% more than can be live at once"),
        (0, 0, ""),
    ],
)
def test_the_gap_of_the_plan_is_said(block: int, live: int, said: str) -> None:
    program = run(CASE.logical, for_stage(3, 3))
    summary = summarise(program, verify(program), stage=3, precision="fp32")
    summary["temporary_bytes_per_rank"] = {"block": block, "live": live}
    lines = printed(render_summary(summary), is_coloured=False).splitlines()
    (found,) = [line for line in lines if line.startswith("temporary")] or [""]
    assert found.removeprefix("temporary").strip() == said
