"""The law of moving averages: of each element once, of the updated parameter, as the decision says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.edits import edit, is_of, put, the, with_body, without_ops
from tests.support.lowering import codes
from tests.support.schedules import Case, is_same, run
from zeroir.ir import ops
from zeroir.ir.buffers import Role, whole
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Holding, Program, State
from zeroir.verify import verify

CASES = [
    Case(stage=0, ema=0.9, tied=True),
    Case(stage=1, ema=0.9, precision="fp16", clip=1.0),
    Case(stage=2, ema=0.9, precision="bf16", micro_steps=2),
    Case(stage=3, ema=0.9, keep_fp32=True, precision="bf16"),
]


def averages(program: Program, nth: int = 0) -> tuple[tuple[int, int], ops.Average]:
    place, op = the(program, ops.Average, UPDATE, nth)
    return place, op


@pytest.mark.parametrize("case", CASES)
def test_averages_are_proved(case: Case) -> None:
    assert codes(case.scheduled, case.logical) == set()


@pytest.mark.parametrize("case", CASES)
def test_an_average_that_is_missing_or_taken_twice_is_found(case: Case) -> None:
    place, op = averages(case.scheduled)
    for new in ((), (replace(op, event=None), op)):
        assert "Z403" in codes(put(case.scheduled, place, *new))


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
    assert codes(put(program, place, swapped)) & {"Z403", "Z005"}


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
    assert codes(put(CASES[1].scheduled, place, replace(op, skip=None))) == {"Z405"}
    _, other = averages(CASES[0].scheduled)
    assert other.skip is None


def test_dropping_all_averages_is_found_by_the_reference() -> None:
    case = CASES[3]
    bare = without_ops(case.scheduled, is_of(ops.Average))
    buffers = tuple(b for b in bare.buffers if not b.name.endswith(".ema"))
    assert codes(replace(bare, buffers=buffers), case.logical) == {"Z406"}


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

    back = ops.Cast(source=whole(copy), destination=whole(home), stream=average.stream)
    again = replace(back, source=back.destination, destination=back.source)
    update = program.section_by_name[UPDATE]
    program = with_body(program, UPDATE, (back, *update.body, again))
    sections = (
        replace(s, entry=with_copy(s.entry), exit=with_copy(s.exit)) for s in program.sections
    )
    handing = replace(program, buffers=(*program.buffers, copy), sections=tuple(sections))
    assert codes(handing, case.logical) == set()
    assert is_same(run(handing), run(case.scheduled))
