"""What ``add_micro_batch_weights`` and ``accumulate`` change in a logical program, and what they leave alone."""

from __future__ import annotations

import pytest

from tests.support.programs import mlp
from zeroir.errors import InternalError
from zeroir.frontend.lowering.accumulate import accumulate
from zeroir.frontend.lowering.micro_batch_weights import add_micro_batch_weights
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region
from zeroir.ir.op_fields import op_fields
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program
from zeroir.verify import verify

LEAN = mlp(precision="bf16", clip=1.0, tied=True, ema=0.5)


def lines(program: Program, section: str) -> list[ops.Op]:
    return list(program.section_by_name[section].body)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_what_they_make_is_proved(precision: str, is_weighted: bool) -> None:
    lean = mlp(precision=precision, clip=1.0, tied=True, keep_fp32=True)
    weighted = add_micro_batch_weights(lean) if is_weighted else lean
    for program in (weighted, accumulate(weighted)):
        report = verify(program, program)
        assert report.is_valid, report.render()


def test_each_is_for_programs_of_one_micro_step() -> None:
    for change in (add_micro_batch_weights, accumulate):
        with pytest.raises(InternalError, match="for one micro-step"):
            change(accumulate(LEAN))
    assert accumulate(add_micro_batch_weights(LEAN)).weight == "batch_weight"


def test_micro_steps_differ_from_one_another_in_nothing() -> None:
    program = accumulate(add_micro_batch_weights(LEAN))
    assert lines(program, MICRO_STEP) == lines(program, LAST_MICRO_STEP)


def test_every_sum_begins_at_zero_and_is_cleared() -> None:
    """The FP32 sums, the loss and the weight: what a micro-step adds to, the update fills with 0."""
    for lean in (LEAN, add_micro_batch_weights(LEAN)):
        program = accumulate(lean)
        persistent = {b.name for b in program.buffers if b.is_persistent}
        added = {
            region.buffer
            for op in lines(program, MICRO_STEP)
            for region in effects(op).accumulates
            if region.buffer in persistent
        }
        cleared = {
            op.destination.buffer
            for op in lines(program, UPDATE)
            if isinstance(op, ops.Fill) and op.value == 0.0
        }
        assert added == cleared
        assert {"loss", "weight_sum"} < added


def test_calls_keep_their_order_and_operands() -> None:
    """Segments are called as before, but for the loss scale and the loss."""
    before = [op for op in lines(LEAN, LAST_MICRO_STEP) if isinstance(op, ops.Compute)]
    after = [
        op
        for op in lines(accumulate(add_micro_batch_weights(LEAN)), MICRO_STEP)
        if isinstance(op, ops.Compute)
    ]
    assert [op.segment for op in before] == [op.segment for op in after]
    others = {"loss_scale": "tangent", "loss": "batch_loss"}
    for old, new in zip(before, after, strict=True):
        for one, other in zip(effects(old).reads, effects(new).reads, strict=True):
            assert other.buffer == others.get(one.buffer, one.buffer)
        for one, other in zip(effects(old).writes, effects(new).writes, strict=True):
            assert other.buffer == others.get(one.buffer, one.buffer)


def test_a_step_without_data_is_skipped_by_every_op_that_can() -> None:
    skip = Region(buffer="skip", offset=0, numel=1)
    able = [
        op
        for op in lines(add_micro_batch_weights(LEAN), UPDATE)
        if any(field.name == "skip" for field in op_fields(type(op)))
    ]
    assert {type(op) for op in able} >= {ops.Decide, ops.OptimizerStep, ops.Average}
    for op in able:
        effect = effects(op)
        assert skip in (*effect.reads, *effect.writes)
