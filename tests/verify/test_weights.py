"""The divisor of an update is the weight of exactly the micro-steps whose gradients were added (Z402)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import at, places, put, the, with_report_of
from tests.support.lowering import codes
from tests.support.schedules import Case
from tests.verify.test_rejects import find
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import Micro, WeightContent
from zeroir.ir.mesh import COMPUTE, REDUCE
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Pending, Program, Section
from zeroir.ir.reports import Quantity
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.verify import verify

COUNTED = Case(stage=2, precision="bf16", micro_steps=2)
WEIGHTED = Case(stage=2, precision="bf16", micro_steps=2, is_weighted=True, clip=1.0)
CASES = (
    COUNTED,
    WEIGHTED,
    replace(COUNTED, overlap_update=True),
    replace(WEIGHTED, overlap_update=True, clip=None),
    replace(WEIGHTED, micro_steps=1),
    replace(WEIGHTED, stage=0, precision="fp16"),
    Case(stage=3, micro_steps=2, is_weighted=True, tied=True, ema=0.5),
)


def _weight(name: str) -> Region:
    return Region(buffer=name, offset=0, numel=1)


def _adds(op: Op) -> bool:
    return isinstance(op, ops.Cast) and op.destination == _weight("weight_sum")


def _clears(op: Op) -> bool:
    return isinstance(op, ops.Fill) and op.destination == _weight("weight_sum")


def _reduces(op: Op) -> bool:
    return isinstance(op, ops.AllReduce) and any(
        pair.destination == _weight("weight") for pair in op.pairs
    )


def _changed(
    program: Program, section: str, is_wanted: Callable[[Op], bool], *new: Op, twice: bool = False
) -> Program:
    """The program with other ops in the place of one, and with the waits that these need."""
    program = without_waits(program)
    place = find(program, section, is_wanted)
    op = at(program, place)
    return derive_waits(put(program, place, *((op, op) if twice else new)))


@pytest.mark.parametrize("case", CASES)
def test_every_schedule_of_weights_is_proved(case: Case) -> None:
    report = verify(case.scheduled, case.logical)
    assert report.is_valid, report.render()


@pytest.mark.parametrize("case", [COUNTED, WEIGHTED])
@pytest.mark.parametrize("section", [MICRO_STEP, LAST_MICRO_STEP])
def test_a_weight_that_is_not_added_or_added_twice_is_found(case: Case, section: str) -> None:
    for program in (case.logical, case.scheduled):
        assert codes(_changed(program, section, _adds)) == {"Z402"}
        assert codes(_changed(program, section, _adds, twice=True)) == {"Z402"}


@pytest.mark.parametrize("case", [COUNTED, WEIGHTED])
def test_a_weight_that_is_not_cleared_is_found(case: Case) -> None:
    for program in (case.logical, case.scheduled):
        assert codes(_changed(program, UPDATE, _clears)) == {"Z402"}


def test_a_weight_that_replaces_the_ones_before_is_found() -> None:
    program = COUNTED.scheduled
    place = find(program, MICRO_STEP, _adds)
    op = at(program, place)
    assert isinstance(op, ops.Cast)
    assert codes(put(program, place, replace(op, mode=Mode.WRITE))) == {"Z402"}


def test_a_weight_that_is_not_reduced_or_reduced_twice_is_found() -> None:
    program = replace(WEIGHTED, clip=None).scheduled
    for damaged in (
        _changed(program, UPDATE, _reduces),
        _changed(program, UPDATE, _reduces, twice=True),
    ):
        assert "Z402" in codes(damaged)


def test_a_count_that_is_reduced_needs_another_divisor() -> None:
    """Each rank counts its micro-steps: their number times the ranks, or their sum over ranks, is the divisor."""
    program = COUNTED.scheduled
    place, decide = the(program, ops.Decide, UPDATE)
    assert decide.divisor == COUNTED.ranks
    for divisor in (1, 2, 6):
        damaged = put(program, place, replace(decide, divisor=divisor))
        assert codes(damaged) == {"Z402"}
    pair = ops.Pair(source=_weight("weight"), destination=_weight("weight"))
    reduced = ops.AllReduce(pairs=(pair,), comm="reduce", stream=REDUCE)
    for divisor, expected in ((1, set()), (COUNTED.ranks, {"Z402"})):
        changed = _changed(
            program,
            UPDATE,
            lambda op: isinstance(op, ops.Decide),
            reduced,
            replace(decide, divisor=divisor),
        )
        assert codes(changed, COUNTED.logical) == expected


def test_a_decision_without_the_weights_is_found() -> None:
    program = WEIGHTED.scheduled
    place, decide = the(program, ops.Decide, UPDATE)
    assert "Z005" in codes(put(program, place, replace(decide, weight=None)))
    fp16 = Case(stage=0, precision="fp16", micro_steps=2, is_weighted=True).scheduled
    place, decide = the(fp16, ops.Decide, UPDATE)
    assert codes(put(fp16, place, replace(decide, weight=None))) == {"Z402", "Z408"}
    wrong = replace(decide, weight=_weight("batch_weight"))
    assert codes(put(fp16, place, wrong)) == {"Z402", "Z408"}


def test_an_unweighted_batch_weighs_one() -> None:
    program = COUNTED.scheduled
    scalars = tuple(
        replace(s, values=(2.0,)) if s.buffer == "batch_weight" else s for s in program.scalars
    )
    assert codes(replace(program, scalars=scalars)) == {"Z402"}
    without = tuple(s for s in program.scalars if s.buffer != "batch_weight")
    assert codes(replace(program, scalars=without)) == {"Z402"}


def test_the_host_writes_one_weight() -> None:
    program = WEIGHTED.scheduled
    twin = replace(program.buffer_by_name["batch_weight"], name="twin")
    assert codes(replace(program, buffers=(*program.buffers, twin))) == {"Z402"}
    assert "Z008" in codes(replace(program, weight="loss"))
    assert "Z001" in codes(replace(program, weight="nowhere"))


def test_no_buffer_keeps_the_weight_of_a_micro_batch_over_a_boundary() -> None:
    """The host writes the next weight at a boundary, so a copy of this one is another number then."""
    program = WEIGHTED.scheduled
    section = program.section_by_name[MICRO_STEP]
    claim = replace(
        program.section_by_name[LAST_MICRO_STEP].exit.holdings[0],
        region=_weight("weight"),
        content=WeightContent(micro=Micro.CURRENT),
    )
    state = replace(section.entry, holdings=(*section.entry.holdings, claim))
    sections = tuple(
        replace(s, entry=state, exit=state) if s.name == MICRO_STEP else s for s in program.sections
    )
    assert "Z008" in codes(replace(program, sections=sections))


def test_the_backward_begins_with_the_weight() -> None:
    """A loss or a gradient that is not multiplied with the weight is another value than the logical program's."""
    program, logical = WEIGHTED.scheduled, WEIGHTED.logical
    for name in ("tangent", "weighted_loss"):

        def scales(op: Op, name: str = name) -> bool:
            return isinstance(op, ops.Scale) and op.region.buffer == name

        damaged = _changed(program, LAST_MICRO_STEP, scales)
        assert not verify(damaged, logical).is_valid


def test_the_weight_that_the_engine_reports_is_the_decisions() -> None:
    program = WEIGHTED.scheduled
    place = find(program, UPDATE, _clears)
    dirty = ops.Fill(destination=_weight("weight"), value=0.0, stream="compute")
    assert "Z408" in codes(put(program, place, dirty, at(program, place)))


def test_the_host_writes_the_weights_of_the_logical_program() -> None:
    """Without the line `weight` every batch would weigh what the buffer begins with."""
    program = replace(WEIGHTED.scheduled, weight=None)
    assert codes(program, WEIGHTED.logical) == {"Z406"}
    # On one rank no sum over ranks is missing.
    counted = replace(COUNTED, ranks=1)
    program = replace(counted.scheduled, weight="batch_weight")
    assert codes(program) == {"Z408"}  # the engine has no sum to divide by
    program = with_report_of(program, Quantity.SUMMED_WEIGHT, "weight")
    assert verify(program).is_valid
    assert codes(program, counted.logical) == {"Z406"}


@pytest.mark.parametrize("is_disguised", [False, True])
def test_a_step_without_data_is_skipped(is_disguised: bool) -> None:
    """Also where something else of the decision stands in %skip."""
    program = WEIGHTED.scheduled
    place, decide = the(program, ops.Decide)
    assert decide.skip is not None
    copy = ops.Cast(source=decide.gradient_divisor, destination=decide.skip, stream=decide.stream)
    new = (replace(decide, skip=None), *((copy,) if is_disguised else ()))
    program = put(program, place, *new)
    for step in places(program, lambda op: isinstance(op, ops.OptimizerStep)):
        op = at(program, step)
        assert isinstance(op, ops.OptimizerStep)
        program = put(program, step, replace(op, skip=None))
    assert codes(program, WEIGHTED.logical) == {"Z408"}
    reports = tuple(r for r in program.reports if r.quantity is not Quantity.SKIP)
    assert codes(replace(program, reports=reports), WEIGHTED.logical) == {"Z406"}


def _ending_late(section: Section, is_wanted: Callable[[Op], bool]) -> Section:
    """The section with one of its casts or fills last, and under way at its end."""
    (late,) = (op for op in section.body if is_wanted(op))
    assert isinstance(late, ops.Cast | ops.Fill)
    rest = tuple(op for op in section.body if op is not late)
    state = replace(section.exit, pending=(_LATE,))
    return replace(section, body=(*rest, replace(late, event=_LATE.event)), exit=state)


def _waiting(section: Section) -> Section:
    """The section with a wait for what is under way at its beginning."""
    body = (ops.Wait(waited=_LATE.event, on=_LATE.stream), *section.body)
    return replace(section, entry=replace(section.entry, pending=(_LATE,)), body=body)


_LATE = Pending(event="late", stream=COMPUTE)


def test_no_op_reads_a_weight_while_the_host_writes_the_next() -> None:
    """The host writes it at the boundary before each micro-step, and waits for no op that is under way there."""
    program = without_waits(WEIGHTED.scheduled)
    by_name = program.section_by_name
    sections = (
        _waiting(_ending_late(by_name[MICRO_STEP], _adds)),
        _waiting(by_name[LAST_MICRO_STEP]),
        _ending_late(by_name[UPDATE], _clears),
    )
    report = verify(derive_waits(replace(program, sections=sections)))
    sentences = [finding.sentence for finding in report.findings if finding.code == "Z105"]
    assert any(
        "uses %batch_weight, which the host fills again" in sentence for sentence in sentences
    ), report.render()
