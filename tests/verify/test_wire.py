"""What a collective reads, writes and sends: the pairs of one launch, and the dtype on the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.edits import at, put, the, with_buffers
from tests.support.lowering import codes
from tests.support.schedules import Case
from tests.verify.test_rejects import find
from tests.verify.test_values import FP16, FP32, LOSS, changed, op_of
from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Pair
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.verify import verify


def test_pairs_of_one_launch_may_not_feed_each_other() -> None:
    """The pairs of a launch have no order: one may read before or after another one writes."""
    program = FP32.scheduled
    reduce = op_of(program, UPDATE, ops.AllReduce)
    assert isinstance(reduce, ops.AllReduce)
    norm = reduce.pairs[0].source
    chained = replace(reduce, pairs=(*reduce.pairs, Pair(source=norm, destination=LOSS)))
    chained = replace(chained, pairs=tuple(p for p in chained.pairs if p.source != LOSS))
    is_wanted = lambda op: isinstance(op, ops.AllReduce)  # noqa: E731
    assert codes(changed(program, UPDATE, is_wanted, chained)) == {"Z010"}


def test_staging_over_what_is_read_later_is_found() -> None:
    program = FP32.scheduled
    place, scatter = the(program, ops.ReduceScatter, LAST_MICRO_STEP)
    staged = replace(scatter, staging=Region(buffer="input.x", offset=0, numel=8))
    report = verify(put(program, place, staged))
    assert codes(report) <= {"Z103", "Z105"}
    assert not report.is_valid


def on_wire(program: Program, section: str, kind: type, wire: DType) -> Program:
    place = find(program, section, lambda op: isinstance(op, kind))
    op = at(program, place)
    assert isinstance(op, ops.AllGather | ops.ReduceScatter | ops.AllReduce)
    return put(program, place, replace(op, wire_dtype=wire))


@pytest.mark.parametrize("wire", [DType.I32, DType.I64])
def test_numbers_do_not_travel_as_integers(wire: DType) -> None:
    program = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.AllGather, wire)
    assert codes(program) == {"Z004"}


@pytest.mark.parametrize(("case", "wire"), [(FP32, DType.BF16), (FP16, DType.BF16)])
def test_a_parameter_that_was_rounded_on_the_wire_is_another(case: Case, wire: DType) -> None:
    program = on_wire(case.scheduled, LAST_MICRO_STEP, ops.AllGather, wire)
    assert codes(program) == {"Z401"}


def test_a_norm_that_was_rounded_on_the_wire_is_no_norm() -> None:
    program = on_wire(FP32.scheduled, UPDATE, ops.AllReduce, DType.BF16)
    assert codes(program) == {"Z408", "Z405"}  # the loss, too, is another number


def test_a_wider_wire_changes_nothing() -> None:
    case = Case(stage=3, precision="bf16")
    program = on_wire(case.scheduled, LAST_MICRO_STEP, ops.AllGather, DType.F32)
    program = on_wire(program, LAST_MICRO_STEP, ops.ReduceScatter, DType.F32)
    assert verify(program, case.logical).is_valid


def test_a_gradient_that_was_rounded_on_the_wire_is_a_sum_but_not_the_same_number() -> None:
    program = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.ReduceScatter, DType.BF16)
    assert verify(program).is_valid
    report = verify(program, FP32.logical)
    assert codes(report) == {"Z406"}
    assert "wire=bf16" in report.findings[0].op
    assert "passes through bf16" in report.findings[0].sentence


def test_sums_are_taken_in_fp32() -> None:
    """Values that travel in F64 are added in F64, which rounds in another way; copies do not round."""
    program = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.ReduceScatter, DType.F64)
    assert codes(program, FP32.logical) == {"Z406"}
    gathered = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.AllGather, DType.F64)
    assert verify(gathered, FP32.logical).is_valid


def test_sums_over_micro_steps_travel_in_fp32() -> None:
    case = Case(stage=1, precision="bf16", micro_steps=2)
    program = on_wire(case.scheduled, LAST_MICRO_STEP, ops.ReduceScatter, DType.BF16)
    assert codes(program, case.logical) == {"Z406"}


UNIT_BY_UNIT = Case(
    stage=3, precision="bf16", micro_steps=2, order=OrderByLayer(micro_batches=2, whole_step=True)
)


def test_a_sum_of_micro_batches_of_one_section_stays_in_fp32() -> None:
    """Their contributions have no sum of earlier micro-steps among them, and still may not be rounded together."""
    program = UNIT_BY_UNIT.scheduled
    place, step = the(program, ops.OptimizerStep, UPDATE)
    total = program.buffer_by_name[step.grad.buffer]
    assert total.dtype is DType.F32
    narrow = replace(total, name="narrow", dtype=DType.BF16, role=Role.STAGING, holds=None)
    rounded = replace(step.grad, buffer=narrow.name)
    changed = put(
        with_buffers(program, narrow),
        place,
        ops.Alloc(buffer=narrow.name, stream=step.stream),
        ops.Cast(source=step.grad, destination=rounded, stream=step.stream),
        ops.Cast(source=rounded, destination=step.grad, stream=step.stream),
        ops.Release(buffer=narrow.name, stream=step.stream),
        step,
    )
    report = verify(changed, UNIT_BY_UNIT.logical)
    assert codes(report) == {"Z406"}
    assert "passes through bf16" in report.findings[0].sentence


def test_a_sum_of_micro_batches_of_one_section_travels_in_fp32() -> None:
    program = UNIT_BY_UNIT.scheduled
    reductions = [
        (s, i)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if isinstance(op, ops.ReduceScatter)
        and program.buffer_by_name[op.pairs[0].source.buffer].dtype is DType.F32
    ]
    assert reductions
    for place in reductions:
        op = at(program, place)
        assert isinstance(op, ops.ReduceScatter)
        report = verify(
            put(program, place, replace(op, wire_dtype=DType.BF16)), UNIT_BY_UNIT.logical
        )
        assert codes(report) == {"Z406"}


def test_a_reduction_rounds_to_the_dtype_of_the_gradient() -> None:
    """Ranks that add up widened gradients and never round the sum compute other numbers."""
    case = Case(stage=2, precision="bf16", overlap_update=True)
    program = without_waits(case.scheduled)
    place, reduce = the(program, ops.ReduceScatter, LAST_MICRO_STEP)
    (pair,) = reduce.pairs
    widening, cast = the(
        program, ops.Cast, LAST_MICRO_STEP, is_wanted=lambda op: op.source == pair.destination
    )
    source = program.buffer_by_name[pair.source.buffer]
    wide = replace(source, name="wide", dtype=DType.F32, role=Role.STAGING, holds=None)
    widened = replace(pair.source, buffer=wide.name)
    changed = put(
        put(with_buffers(program, wide), widening),
        place,
        ops.Alloc(buffer=wide.name, stream=reduce.stream),
        ops.Cast(source=pair.source, destination=widened, stream=reduce.stream),
    )
    # The buffer of the widened gradient begins above the cast that filled it.
    begun = find(
        changed,
        LAST_MICRO_STEP,
        lambda op: isinstance(op, ops.Alloc) and op.buffer == cast.destination.buffer,
    )
    unrounded = replace(reduce, pairs=(Pair(source=widened, destination=cast.destination),))
    changed = put(
        changed,
        begun,
        at(changed, begun),
        unrounded,
        ops.Release(buffer=wide.name, stream=reduce.stream),
    )
    report = verify(derive_waits(changed), case.logical)
    assert codes(report) == {"Z406"}
    assert "ranks add up the gradient" in report.findings[0].sentence
