"""The view of a section: readers, writers, lives, the op that makes the loss, and buffers that one result fills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Region
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.text import parse

TEXT = (Path(__file__).parents[1] / "passes" / "kept.zir").read_text()
PROGRAM = parse(TEXT)
FORWARD, LOSS, LAST, BACKWARD = 2, 3, 5, 7
"""The compute ops of the section: of unit a, b, b and a."""


def view(program: Program = PROGRAM, section: str = LAST_MICRO_STEP) -> SectionView:
    return SectionView(program, program.section_by_name[section].body)


def test_readers_and_writers_are_in_order() -> None:
    seen = view()
    assert seen.readers["h"] == (LOSS, LAST)
    assert seen.readers["x"] == (FORWARD, BACKWARD)
    assert seen.writers["m"] == (FORWARD,)
    assert "x" not in seen.writers


def test_to_accumulate_is_to_read_and_to_write() -> None:
    seen = view(section=UPDATE)
    assert seen.readers["a.grad"] == seen.writers["a.grad"] == (1,)


def test_lives_begin_and_end() -> None:
    seen = view()
    assert (seen.allocs["h"], seen.releases["h"]) == ((0,), (6,))
    assert "x" not in seen.allocs


def test_the_forward_ends_with_the_op_that_makes_the_loss() -> None:
    seen = view()
    assert seen.loss == LOSS
    assert [index in seen.backward for index in seen.computes] == [False, False, True, True]
    update = view(section=UPDATE)
    assert update.loss is None
    assert len(update.backward) == 0


def test_a_filled_buffer_lives_once_and_is_written_once_and_wholly() -> None:
    filled = view().filled
    assert list(filled) == ["h", "m", "dh"]
    assert (filled["m"].writer, filled["m"].output, filled["m"].readers) == (
        FORWARD,
        1,
        frozenset({BACKWARD}),
    )
    section = PROGRAM.section_by_name[LAST_MICRO_STEP]
    twice = ops.Fill(
        destination=Region(buffer="m", offset=0, numel=32), value=0.0, stream="compute"
    )
    body = (*section.body[:2], twice, *section.body[2:])
    again = replace(PROGRAM, sections=(replace(section, body=body), *PROGRAM.sections[1:]))
    assert list(view(again).filled) == ["h", "dh"]
    text = TEXT.replace("buffer %m : f32[32]", "buffer %m : f32[33]")
    part = parse(text.replace("(%h, %m)", "(%h, %m[0:32])").replace("%dh, %m,", "%dh, %m[0:32],"))
    assert list(view(part).filled) == ["h", "dh"]
