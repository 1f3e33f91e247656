"""The law of moving averages: of each element once, of the updated parameter, as the decision says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.edits import at, edit, put
from tests.support.schedules import Case, is_same, run
from tests.verify.test_rejects import codes, find
from zeroir.ir import ops
from zeroir.ir.buffers import Role, whole
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Holding, Program, Section, State
from zeroir.verify import verify

CASES = [
    Case(stage=0, ema=0.9, tied=True),
    Case(stage=1, ema=0.9, precision="fp16", clip=1.0),
    Case(stage=2, ema=0.9, precision="bf16", micro_steps=2),
    Case(stage=3, ema=0.9, keep_fp32=True, precision="bf16"),
]


def averages(program: Program, nth: int = 0) -> tuple[tuple[int, int], ops.Average]:
    place = find(program, UPDATE, lambda op: isinstance(op, ops.Average), nth)
    op = at(program, place)
    assert isinstance(op, ops.Average)
    return place, op


@pytest.mark.parametrize("case", CASES)
def test_averages_are_proved(case: Case) -> None:
    report = verify(case.scheduled, case.logical)
    assert report.is_valid, report.render()


@pytest.mark.parametrize("case", CASES)
def test_an_average_that_is_missing_is_found(case: Case) -> None:
    place, _ = averages(case.scheduled)
    assert "Z403" in codes(verify(put(case.scheduled, place)))


@pytest.mark.parametrize("case", CASES)
def test_an_average_taken_twice_is_found(case: Case) -> None:
    place, op = averages(case.scheduled)
    twice = put(case.scheduled, place, replace(op, event=None), op)
    assert "Z403" in codes(verify(twice))


@pytest.mark.parametrize("case", CASES)
def test_an_average_before_the_update_is_found(case: Case) -> None:
    (section, line), op = averages(case.scheduled)

    def first(body: list[Op]) -> None:
        average = body.pop(line)
        assert isinstance(average, ops.Average)
        body.insert(1, replace(average, event=None))

    findings = verify(edit(case.scheduled, section, first)).findings
    assert any("does not hold updated parameters" in finding.sentence for finding in findings)
    assert op.event is None or case.stage < 3


@pytest.mark.parametrize("case", CASES)
def test_the_average_of_other_elements_is_found(case: Case) -> None:
    program = case.scheduled
    place, op = averages(program, 1)
    _, like = averages(program, 2)
    swapped = replace(op, average=like.average)
    assert codes(verify(put(program, place, swapped))) & {"Z403", "Z005"}


@pytest.mark.parametrize("case", CASES)
def test_another_decay_is_found_by_the_reference(case: Case) -> None:
    place, op = averages(case.scheduled)
    mutant = put(case.scheduled, place, replace(op, decay=0.8))
    assert verify(mutant).is_valid
    report = verify(mutant, case.logical)
    assert codes(report) == {"Z406"}
    assert any("averaged with another decay" in finding.sentence for finding in report.findings)


def test_averages_that_ignore_the_decision_are_found() -> None:
    place, op = averages(CASES[1].scheduled)
    assert codes(verify(put(CASES[1].scheduled, place, replace(op, skip=None)))) == {"Z405"}
    _, other = averages(CASES[0].scheduled)
    assert other.skip is None


def test_dropping_all_averages_is_found_by_the_reference() -> None:
    case = CASES[3]
    program = case.scheduled
    sections = tuple(
        replace(s, body=tuple(op for op in s.body if not isinstance(op, ops.Average)))
        for s in program.sections
    )
    buffers = tuple(b for b in program.buffers if not b.name.endswith(".ema"))
    bare = replace(program, sections=sections, buffers=buffers)
    assert codes(verify(bare, case.logical)) == {"Z406"}


@pytest.mark.parametrize("case", CASES[1:])
def test_an_average_that_steps_hand_on_begins_with_the_parameters(case: Case) -> None:
    """A buffer that lives from step to step may hold averages, and the runtime gives it what a step would leave."""
    program = case.scheduled
    _, average = averages(program)
    home = program.buffer_by_name[average.average.buffer]
    assert home.holds is not None
    copy = replace(home, name="copy", role=Role.GATHERED, holds=None)
    holding = Holding(region=whole(copy), content=home.holds)

    def with_copy(state: State) -> State:
        return replace(state, live=(*state.live, copy.name), holdings=(*state.holdings, holding))

    sections: list[Section] = []
    for section in program.sections:
        body = section.body
        if section.name == UPDATE:
            back = ops.Cast(source=whole(copy), destination=whole(home), stream=average.stream)
            again = replace(back, source=back.destination, destination=back.source)
            body = (back, *body, again)
        sections.append(
            replace(
                section, body=body, entry=with_copy(section.entry), exit=with_copy(section.exit)
            )
        )
    handing = replace(program, buffers=(*program.buffers, copy), sections=tuple(sections))
    report = verify(handing, case.logical)
    assert report.is_valid, report.render()
    assert is_same(run(handing), run(program))
