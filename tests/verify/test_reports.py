"""The engine reports what the header names, and each report holds what it says (Z408)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.edits import at, edit, put, the, with_buffers, with_report_of
from tests.support.lowering import codes
from tests.support.schedules import Case, is_same, run
from tests.support.subjects import subject
from tests.verify.test_rejects import find
from zeroir.frontend.lowering.micro_batch_weights import one_number
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, Program
from zeroir.ir.reports import Quantity
from zeroir.passes.common.rewrite import map_regions
from zeroir.verify import verify

CLIPPED = Case(stage=3, precision="fp16", clip=1.0)
ACCUMULATING = Case(stage=2, precision="bf16", micro_steps=2, clip=1.0)
SPECULATIVE = subject("stage 1, speculative")


def temporary(program: Program, like: str, name: str) -> Buffer:
    return replace(program.buffer_by_name[like], name=name, role=Role.STAGING, holds=None)


def ending(program: Program, section: str, *new: Op) -> Program:
    number = [s.name for s in program.sections].index(section)
    return edit(program, number, lambda body: body.extend(new))


@pytest.mark.parametrize("case", [CLIPPED, ACCUMULATING], ids=["fp16", "accumulating"])
def test_no_report_may_be_left_out(case: Case) -> None:
    program = case.scheduled
    for report in program.reports:
        without = replace(program, reports=tuple(r for r in program.reports if r is not report))
        assert codes(without, case.logical) & {"Z406", "Z408"}, report


@pytest.mark.parametrize("case", [CLIPPED, ACCUMULATING], ids=["fp16", "accumulating"])
def test_no_report_may_name_another_one_number(case: Case) -> None:
    program = with_buffers(case.scheduled, one_number("other"))
    assert verify(program, case.logical).is_valid
    for report in program.reports:
        changed = with_report_of(program, report.quantity, "other")
        assert codes(changed, case.logical) <= {"Z008", "Z405", "Z406", "Z408"}
        assert not verify(changed, case.logical).is_valid, report


def test_a_report_is_of_a_scalar_that_is_declared_and_has_the_right_type() -> None:
    program = CLIPPED.scheduled
    assert codes(with_report_of(program, Quantity.SKIP, "nothing")) == {"Z001"}
    assert codes(with_report_of(program, Quantity.SKIP, "lr")) == {"Z008"}
    assert codes(with_report_of(program, Quantity.LOSS_SCALE, "step")) == {"Z008"}
    twice = replace(program, reports=(*program.reports, program.reports[0]))
    assert codes(twice) == {"Z002"}


def test_the_loss_of_all_ranks_may_not_become_this_ranks_again() -> None:
    program = CLIPPED.scheduled
    loss = whole(program.buffer_by_name["loss"])
    place = find(program, UPDATE, lambda op: isinstance(op, ops.AllReduce))
    own = temporary(program, "loss", "own")
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    kept: list[Op] = [
        ops.Alloc(buffer=own.name, stream=reduce.stream),
        ops.Cast(source=loss, destination=whole(own), stream=reduce.stream),
    ]
    changed = ending(
        put(with_buffers(program, own), place, *kept, reduce),
        UPDATE,
        ops.Cast(source=whole(own), destination=loss, stream=reduce.stream),
        ops.Release(buffer=own.name, stream=reduce.stream),
    )
    report = verify(changed, CLIPPED.logical)
    assert codes(report) == {"Z408"}
    assert "is not summed over dp" in report.findings[0].sentence


def test_the_loss_may_be_summed_elsewhere() -> None:
    """What is reported is found by its name, not by an op that reduces the loss."""
    case = Case(stage=2, precision="bf16")
    program = case.scheduled
    loss = whole(program.buffer_by_name["loss"])
    place, reduce = the(program, ops.AllReduce, UPDATE)
    elsewhere = temporary(program, "loss", "elsewhere")
    pair = ops.Pair(source=loss, destination=whole(elsewhere))
    others = tuple(p for p in reduce.pairs if p.source != loss)
    changed = put(
        with_buffers(program, elsewhere),
        place,
        ops.Alloc(buffer=elsewhere.name, stream=reduce.stream),
        replace(reduce, event=None, pairs=(*others, pair)),
        ops.Cast(
            source=whole(elsewhere), destination=loss, stream=reduce.stream, event=reduce.event
        ),
        ops.Release(buffer=elsewhere.name, stream=reduce.stream),
    )
    assert verify(changed, case.logical).is_valid
    assert is_same(run(changed), run(program))


@pytest.mark.parametrize("quantity", [Quantity.SKIP, Quantity.REDO, Quantity.SQUARED_NORM])
def test_a_decision_may_not_be_overwritten_before_it_is_reported(quantity: Quantity) -> None:
    program = SPECULATIVE.scheduled
    buffer = program.buffer_by_name[program.report_of[quantity].buffer]
    fill = ops.Fill(destination=whole(buffer), value=1.0, stream=COMPUTE)
    report = verify(ending(program, UPDATE, fill), SPECULATIVE.logical)
    assert codes(report) == {"Z408"}


@pytest.mark.parametrize("name", ["batch_loss", "summed_loss", "redo", "norm"])
def test_a_scalar_of_a_telling_name_is_no_report(name: str) -> None:
    case = Case(stage=1)
    assert name not in case.scheduled.buffer_by_name
    program = with_buffers(case.scheduled, one_number(name))
    assert verify(program, case.logical).is_valid
    assert is_same(run(program), run(case.scheduled))


def read_from_copy(program: Program, kind: type[Op], operand: Callable[[Op], Region]) -> Program:
    """The program in which one op of the update reads an operand from a temporary copy."""
    place = find(program, UPDATE, lambda op: isinstance(op, kind))
    op = at(program, place)
    assert not isinstance(op, ops.Wait)
    region = operand(op)
    copy = replace(temporary(program, region.buffer, "copy"), numel=region.numel)
    return put(
        with_buffers(program, copy),
        place,
        ops.Alloc(buffer=copy.name, stream=op.stream),
        ops.Cast(source=region, destination=whole(copy), stream=op.stream),
        map_regions(op, lambda each: whole(copy) if each == region else each),
        ops.Release(buffer=copy.name, stream=op.stream),
    )


def test_live_settings_are_written_where_the_group_declares_them() -> None:
    """A step may read a copy of its learning rate; what the host changes counts all the same."""
    case = Case(stage=1)

    def lr_of(op: Op) -> Region:
        assert isinstance(op, ops.OptimizerStep)
        return op.lr

    changed = read_from_copy(case.scheduled, ops.OptimizerStep, lr_of)
    assert verify(changed, case.logical).is_valid
    assert is_same(run(changed, lr_factor=0.5), run(case.scheduled, lr_factor=0.5))
    assert not is_same(run(changed, lr_factor=0.5), run(case.scheduled))


def test_a_loss_scale_is_read_where_it_is_reported() -> None:
    """A decision may read a copy of the loss scale; the engine reports the scale, and divides the norm by it."""

    def scale_of(op: Op) -> Region:
        assert isinstance(op, ops.Decide)
        assert op.loss_scale is not None
        return op.loss_scale

    changed = read_from_copy(CLIPPED.scheduled, ops.Decide, scale_of)
    assert verify(changed, CLIPPED.logical).is_valid
    made, expected = run(changed), run(CLIPPED.scheduled)
    assert is_same(made, expected)
    assert all(torch.isfinite(torch.tensor(made.losses)).flatten())
