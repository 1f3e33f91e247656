"""A diff shows the changes and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.ops import Alloc, Op, Release, Wait
from zeroir.ir.program import Pending, Program, Section, State
from zeroir.report.diff import _blocks, _without_noise, diff, summary


def changed_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]


def with_body(program: Program, body: Sequence[Op], index: int = 0) -> Program:
    sections = list(program.sections)
    sections[index] = dataclasses.replace(sections[index], body=tuple(body))
    return dataclasses.replace(program, sections=tuple(sections))


def with_events(program: Program, first: int = 0) -> Program:
    """Every op of the first section signals a numbered event that the next op's stream awaits."""
    body: list[Op] = []
    for number, op in enumerate(program.sections[0].body, start=first):
        if isinstance(op, Wait):
            continue
        body.append(dataclasses.replace(op, event=str(number)))
        body.append(Wait(waited=str(number), on="gather"))
    return with_body(program, body)


def test_equal_programs_have_no_diff() -> None:
    assert diff(mlp(), mlp()) == ""
    assert str(summary(mlp(), mlp())).startswith("ops                equal\n")


def test_renumbered_events_are_no_change() -> None:
    assert diff(with_events(mlp()), with_events(mlp(), first=100)) == ""


def test_an_inserted_op_is_one_line_among_numbered_events() -> None:
    plain = mlp()
    body = plain.sections[0].body
    more = with_body(plain, (Alloc(buffer="new", stream="compute"), *body))
    old, new = with_events(plain), with_events(more)
    lines = changed_lines(diff(old, new))
    assert [line[0] for line in lines] == ["+", "+"]
    assert "alloc %new" in lines[0]
    assert "wait !alloc.new" in lines[1]
    counted = summary(old, new)
    assert counted.ops_added == {"alloc": 1, "wait": 1}
    assert counted.ops_removed == {}


def test_an_event_across_a_boundary_has_one_name_on_both_sides() -> None:
    def crossing(event: str) -> Program:
        pending = State(pending=(Pending(event=event, stream="gather"),))
        signals = Release(buffer="h.0", stream="gather", event=event)
        sections = (
            Section(name="micro_step", body=(signals,), exit=pending),
            Section(
                name="last_micro_step", entry=pending, body=(Wait(waited=event, on="compute"),)
            ),
        )
        return dataclasses.replace(mlp(), sections=sections)

    assert diff(crossing("0"), crossing("7")) == ""
    shown = diff(dataclasses.replace(crossing("0"), sections=()), crossing("0"))
    assert shown.count("!release.h.0") == 4


def test_equal_segments_are_folded_and_changed_ones_shown() -> None:
    program = mlp()
    first = program.segments[0]
    renamed = dataclasses.replace(program, segments=(dataclasses.replace(first, name="renamed"),))
    lines = changed_lines(diff(program, renamed))
    assert any(
        re.match(r"\+segment @renamed\(.*\{ … \}  // \d+ nodes, digest [0-9a-f]{12}$", line)
        for line in lines
    )
    node = dataclasses.replace(first.nodes[0], op="aten.neg.default")
    changed = dataclasses.replace(first, nodes=(node, *first.nodes[1:]))
    shown = diff(program, dataclasses.replace(program, segments=(changed, *program.segments[1:])))
    assert "aten.neg.default" in shown
    assert shown.count("aten.") == len(first.nodes) + 1


def test_hunks_name_their_section() -> None:
    text = diff(mlp(), mlp(clip=1.0), old_name="a.zir", new_name="b.zir")
    assert text.startswith("--- a.zir\n+++ b.zir\n@@ ")
    assert (
        re.findall(r"^@@ -\d+,\d+ \+\d+,\d+ @@ (.*)$", text, re.MULTILINE)[-1] == "section update"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (mlp(), mlp(clip=1.0)),
        (mlp(precision="fp16"), mlp()),
        (mlp(blocks=1), mlp(blocks=3)),
        (mlp(), mlp(micro_steps=2)),
        (mlp(), dataclasses.replace(mlp(), sections=())),
    ],
)
@pytest.mark.parametrize("context", [0, 3])
def test_the_diff_turns_the_old_text_into_the_new(old: Program, new: Program, context: int) -> None:
    text = diff(old, new, context=context)
    old, new = _without_noise(old, new)
    assert patched(lines_of(old, new), text) == lines_of(new, old)


def lines_of(program: Program, compared: Program) -> list[str]:
    """The lines of a program that are compared with those of the other one."""
    return [line for lines in _blocks(program, compared).values() for line in lines]


def patched(lines: list[str], text: str) -> list[str]:
    """Apply a unified diff strictly: every line of context and every removed line is where it says."""
    result: list[str] = []
    position = 0
    for line in text.splitlines()[2:]:
        hunk = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)
        if hunk is not None:
            start = int(hunk[1]) - (hunk[2] != "0")
            result += lines[position:start]
            position = start
            assert len(result) == int(hunk[3]) - (hunk[4] != "0")
            continue
        if line[0] in " -":
            assert lines[position] == line[1:]
            position += 1
        if line[0] in " +":
            result.append(line[1:])
    return result + lines[position:]


@given(st.data())
@examples(40)
def test_the_counts_of_ops_equal_the_changed_lines(data: st.DataObject) -> None:
    program = mlp(blocks=1)
    body = list(program.sections[0].body)
    kept = [op for op in body if data.draw(st.booleans())]
    counted = summary(program, with_body(program, kept))
    assert sum(counted.ops_removed.values()) == len(body) - len(kept)
    assert counted.ops_added == {}
    assert len(changed_lines(diff(program, with_body(program, kept)))) == len(body) - len(kept)


def test_the_summary_names_buffers_and_bytes() -> None:
    counted = summary(mlp(blocks=1), mlp(blocks=1, precision="bf16"))
    assert "blocks.0.master" in counted.buffers_added
    assert counted.buffers_removed == ()
    resized = {name: (old, new) for name, old, new in counted.buffers_resized}
    old, new = resized["blocks.0.param"]
    assert old == 2 * new
    assert counted.old_model_state_bytes["param"] == 2 * counted.new_model_state_bytes["param"]
    assert "model state bytes  12,288 → 12,288" in str(counted)


def test_stages_0_and_2_send_as_much() -> None:
    """An all_reduce is a reduce-scatter and an all-gather."""
    old, new = (applied(mlp(), for_stage(stage, 3)) for stage in (0, 2))
    text = str(summary(old, new))
    sent = re.search(r"^bytes on the wire  ([\d,]+) → ([\d,]+) \(", text, re.MULTILINE)
    assert sent is not None
    before, after = (int(figure.replace(",", "")) for figure in sent.groups())
    assert abs(before - after) < 64 < before  # scalars


def test_where_buffers_stand_shows_only_where_nothing_else_differs() -> None:
    old, new = mlp(), mlp(clip=1.0)
    moved = [
        b if b.is_persistent else dataclasses.replace(b, offset=512 * at)
        for at, b in enumerate(old.buffers)
    ]
    planned = dataclasses.replace(old, buffers=tuple(moved))
    assert diff(planned, new) == diff(old, new)
    assert "offset=" in diff(old, planned)
    assert diff(planned, planned) == ""
