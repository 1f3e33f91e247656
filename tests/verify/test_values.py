"""Programs that compute another result, although every op is right by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.edits import at, edit, mapped, put, the
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.schedules import Case
from tests.verify.test_rejects import find
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent, Micro, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, REDUCE
from zeroir.ir.ops import Op, Pair, Reduction
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    ModuleBufferBinding,
    Program,
    Section,
)
from zeroir.ir.reports import Quantity, with_report
from zeroir.ir.text import parse
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.verify import verify

FP32 = Case(stage=3, clip=1.0)
FP16 = Case(stage=3, precision="fp16", clip=1.0)
BF16 = Case(stage=2, precision="bf16", micro_steps=2)
LOSS = Region(buffer="loss", offset=0, numel=1)
GATES = Path(__file__).parents[1] / "data" / "gates"


def changed(program: Program, section: str, is_wanted: Callable[[Op], bool], *new: Op) -> Program:
    return put(program, find(program, section, is_wanted), *new)


def appended(program: Program, section: str, *new: Op) -> Program:
    at_section = [s.name for s in program.sections].index(section)
    return edit(program, at_section, lambda body: body.extend(new))


def op_of(program: Program, section: str, kind: type) -> Op:
    return at(program, find(program, section, lambda op: isinstance(op, kind)))


# --------------------------------------------------------------------------------------------------------- loss


def test_a_loss_that_nobody_reduces_is_not_the_loss_of_all_ranks() -> None:
    program = FP32.scheduled
    place, reduce = the(program, ops.AllReduce, UPDATE)
    without = replace(reduce, pairs=tuple(p for p in reduce.pairs if p.source != LOSS))
    assert codes(put(program, place, without), FP32.logical) == {"Z408"}


SUM_LOSS = ops.AllReduce(pairs=(Pair(source=LOSS, destination=LOSS),), comm="reduce", stream=REDUCE)


@pytest.mark.parametrize("section", [LAST_MICRO_STEP, UPDATE])
@pytest.mark.parametrize(
    "op",
    [
        SUM_LOSS,
        replace(SUM_LOSS, reduction=Reduction.MAX),
        ops.Scale(region=LOSS, by=Region(buffer="loss_scale", offset=0, numel=1), stream=REDUCE),
    ],
)
def test_a_loss_is_summed_once_and_only_by_the_update(section: str, op: Op) -> None:
    program = FP32.scheduled
    joined = appended(
        program,
        section,
        ops.Fill(destination=_scratch(program), value=0.0, stream=COMPUTE, event="then"),
        ops.Wait(waited="then", on=REDUCE),
        op,
    )
    report = verify(joined, FP32.logical)
    assert not report.is_valid
    if isinstance(op, ops.AllReduce) and op.reduction is Reduction.SUM:
        assert codes(report) == {"Z408"}
        assert (
            "once" in report.findings[0].sentence
            or "only the update" in report.findings[0].sentence
        )


def _scratch(program: Program) -> Region:
    """A scalar that any section may write: the divisor of the last step."""
    return whole(program.buffer_by_name["gradient_divisor"])


# ------------------------------------------------------------------------------------------- parts of a gradient


@pytest.mark.parametrize("shard", [None, "dp"])
def test_clearing_a_part_of_a_gradient_is_found(shard: str | None) -> None:
    program = Case(stage=0).scheduled
    place, reduce = the(program, ops.AllReduce, LAST_MICRO_STEP)
    part = Region(buffer=reduce.pairs[0].source.buffer, offset=0, numel=6, shard=shard)
    fill = ops.Fill(destination=part, value=0.0, stream=reduce.stream)
    assert codes(put(program, place, fill, reduce)) == {"Z402"}
    assert codes(put(program, place, reduce, fill)) == {"Z402"}


# -------------------------------------------------------------------------------------------- scalars and bindings


@pytest.mark.parametrize(
    ("source", "target"),
    [("step", "loss_scale"), ("gradient_divisor", "loss_scale"), ("loss_scale", "step")],
)
def test_a_scalar_that_is_replaced_by_another_is_found(source: str, target: str) -> None:
    copy = ops.Cast(
        source=Region(buffer=source, offset=0, numel=1),
        destination=Region(buffer=target, offset=0, numel=1),
        stream=COMPUTE,
    )
    assert codes(appended(Case(stage=2).scheduled, UPDATE, copy)) & {"Z405", "Z408"}


@pytest.mark.parametrize("section", [LAST_MICRO_STEP, EVALUATE])
def test_only_the_update_takes_a_step(section: str) -> None:
    program = parse((GATES / "evaluate.zir").read_text())
    decide = op_of(program, UPDATE, ops.Decide)
    assert codes(appended(program, section, decide)) >= {"Z405"}


def test_inputs_and_first_values_are_those_of_the_logical_program() -> None:
    case = Case(stage=2)
    program = case.scheduled
    (binding,) = program.inputs
    other = tuple(
        replace(b, holds=NamedContent(name="other")) if b.name == binding.buffer else b
        for b in program.buffers
    )
    elsewhere = replace(program, buffers=other)
    assert "Z406" in codes(elsewhere, case.logical)
    faster = tuple(replace(s, values=(1.0,)) if s.buffer == "lr" else s for s in program.scalars)
    assert codes(replace(program, scalars=faster), case.logical) == {"Z406"}
    unset = tuple(s for s in program.scalars if s.buffer != "lr")
    assert codes(replace(program, scalars=unset), case.logical) == {"Z406"}


def test_two_inputs_are_two_values() -> None:
    program = Case(stage=0).scheduled
    (binding,) = program.inputs
    twin = replace(program.buffer_by_name[binding.buffer], name="twin")
    same = replace(
        program,
        buffers=(*program.buffers, twin),
        inputs=(binding, replace(binding, path="twin", buffer="twin")),
    )
    assert codes(same) == {"Z008"}


# ----------------------------------------------------------------------------------- order of three contributions


def with_three_contributions(program: Program, *, is_swapped: bool) -> Program:
    """The first parameter's gradient gets a third contribution, before or after the second."""
    place, second = the(
        program, ops.Compute, LAST_MICRO_STEP, is_wanted=lambda op: op.segment == "pre.backward"
    )
    activation = replace(
        second.arguments[0],
        view=replace(second.arguments[0].view, region=_region_of(program, "h.0")),
    )
    third = replace(second, arguments=(activation, second.arguments[1]))

    def change(body: list[Op]) -> None:
        release = next(op for op in body if isinstance(op, ops.Release) and op.buffer == "h.0")
        body.remove(release)
        line = body.index(second)
        body[line : line + 1] = [third, second] if is_swapped else [second, third]
        body.append(release)

    return edit(program, place[0], change)


def _region_of(program: Program, name: str) -> Region:
    return whole(program.buffer_by_name[name])


def test_three_contributions_are_added_in_one_order() -> None:
    """Rounding depends on the order; a sum of two has only one."""
    logical = Case(stage=0, tied=True).logical
    one, other = (with_three_contributions(logical, is_swapped=s) for s in (False, True))
    programs = [applied(logical, for_stage(0, 3)) for logical in (one, other)]
    assert verify(programs[0], one).is_valid
    assert verify(programs[1], other).is_valid
    report = verify(programs[1], one)
    assert codes(report) == {"Z406"}
    assert "another order" in report.findings[0].sentence


def test_a_call_may_be_repeated_where_the_logical_program_repeats_it() -> None:
    """As in ``f(x) + f(x)``: the same call with the same operands contributes twice."""
    case = Case(stage=0, tied=True)

    def repeated(program: Program) -> Program:
        place, op = the(
            program, ops.Compute, LAST_MICRO_STEP, is_wanted=lambda op: op.segment == "pre.backward"
        )
        return put(program, place, replace(op, event=None), op)

    logical = repeated(case.logical)
    assert verify(logical).is_valid
    program = applied(logical, for_stage(0, 3))
    assert verify(program, logical).is_valid
    assert codes(program, case.logical) == {"Z406"}
    assert codes(repeated(case.scheduled), case.logical) == {"Z406"}
    assert codes(repeated(case.scheduled)) == {"Z402"}


# --------------------------------------------------------------------------------------------------- layouts


def test_a_gradient_lies_as_its_parameter_lies() -> None:
    """A transposed gradient has the right numbers at the wrong elements."""
    program = Case(stage=0).scheduled
    segment = program.segment_by_name["pre.backward"]
    node = segment.nodes[-1]
    (kind,) = node.results
    assert kind is not None
    flipped = replace(kind, stride=kind.stride[::-1])
    turned = replace(segment, nodes=(*segment.nodes[:-1], replace(node, results=(flipped,))))

    def bound(op: Op) -> tuple[Op, ...]:
        if not isinstance(op, ops.Compute) or op.segment != segment.name:
            return (op,)
        (destination,) = op.destinations
        assert destination is not None
        view = replace(destination.view, stride=flipped.stride)
        return (replace(op, destinations=(replace(destination, view=view),)),)

    segments = tuple(turned if s is segment else s for s in program.segments)
    report = verify(mapped(replace(program, segments=segments), bound))
    assert codes(report) == {"Z005"}
    assert "row-major" in report.findings[0].sentence


def test_a_result_fills_its_destination() -> None:
    """Elements that a result leaves out would count as written."""
    program = Case(stage=0).scheduled
    buffers = tuple(
        replace(b, numel=b.numel * 2) if b.name == "h.0" else b for b in program.buffers
    )

    def widened(op: Op) -> tuple[Op, ...]:
        if not isinstance(op, ops.Compute):
            return (op,)
        destinations = tuple(
            replace(d, view=replace(d.view, region=replace(d.view.region, numel=16)))
            if d is not None and d.view.region.buffer == "h.0"
            else d
            for d in op.destinations
        )
        return (replace(op, destinations=destinations),)

    report = verify(mapped(replace(program, buffers=buffers), widened))
    assert codes(report) == {"Z005"}
    assert "leaves 8 of the elements of %h.0 unwritten" in report.findings[0].sentence


def test_a_stream_must_be_able_to_do_its_ops() -> None:
    program = Case(stage=0).scheduled
    place, step = the(program, ops.OptimizerStep, UPDATE)
    assert "Z006" in codes(put(program, place, replace(step, stream="optimizer")))


# --------------------------------------------------------------------------------------------- micro-steps, divisors


@pytest.mark.parametrize("divisor", [1, 2, 6, 9])
def test_gradients_of_one_micro_step_are_divided_by_the_ranks(divisor: int) -> None:
    program = Case(stage=2).scheduled
    place, decide = the(program, ops.Decide, UPDATE)
    assert decide.divisor == 3
    assert codes(put(program, place, replace(decide, divisor=divisor))) == {"Z402"}


def test_gradients_of_any_number_of_micro_steps_are_divided_by_their_weights() -> None:
    program = BF16.scheduled
    place, decide = the(program, ops.Decide, UPDATE)
    fixed = replace(decide, weight=None, divisor=6)
    assert codes(put(program, place, fixed)) == {"Z402"}


# ------------------------------------------------------------------------------------------------ evaluation


def test_an_evaluation_leaves_sums_alone() -> None:
    """The sums of a step begin with zeros, also after an evaluation."""
    program = BF16.scheduled
    name = f"{program.flats[0].name}.grad_sum"
    numel = program.buffer_by_name[name].numel
    dirty = ops.Fill(
        destination=Region(buffer=name, offset=0, numel=numel), value=1.0, stream=COMPUTE
    )
    loss = replace(
        program.buffer_by_name["loss"], name="eval_loss", holds=NamedContent(name="eval_loss")
    )
    for sections in (program.sections, tuple(s for s in program.sections if s.name != MICRO_STEP)):
        evaluate = Section(name=EVALUATE, body=(dirty,))
        found = replace(
            program,
            sections=(*sections, evaluate),
            reports=with_report(program.reports, Quantity.EVAL_LOSS, "eval_loss"),
            buffers=(*program.buffers, loss),
            options=WrittenOptions.of({"micro_steps": "2" if len(sections) == 3 else "1"}),
        )
        report = verify(found)
        assert any(
            f.code == "Z402" and f.section == EVALUATE and name in f.sentence
            for f in report.findings
        )


STATISTIC = Buffer(
    name="mean",
    dtype=DType.F32,
    numel=4,
    space=Space.DEVICE,
    role=Role.MODULE_BUFFER,
    holds=NamedContent(name="mean"),
)


def with_statistic(program: Program) -> Program:
    binding = ModuleBufferBinding(name="mean", buffer="mean", shape=(4,))
    return replace(program, buffers=(*program.buffers, STATISTIC), module_buffers=(binding,))


def test_an_evaluation_leaves_running_statistics_alone() -> None:
    program = with_statistic(parse((GATES / "evaluate.zir").read_text()))
    fill = ops.Fill(destination=whole(STATISTIC), value=1.0, stream=COMPUTE)
    assert verify(appended(program, LAST_MICRO_STEP, fill)).is_valid
    assert codes(appended(program, EVALUATE, fill)) == {"Z103"}


@pytest.mark.parametrize("section", [LAST_MICRO_STEP, UPDATE])
def test_a_value_is_summed_over_no_more_axes_than_in_the_logical_program(section: str) -> None:
    """Such as running statistics: their sum over ranks is another value."""
    case = Case(stage=1, ranks=2)
    logical, program = with_statistic(case.logical), with_statistic(case.scheduled)
    assert verify(program, logical).is_valid
    pair = Pair(source=whole(STATISTIC), destination=whole(STATISTIC))
    reduce = ops.AllReduce(pairs=(pair,), comm="reduce", stream=REDUCE)
    summed = derive_waits(appended(without_waits(program), section, reduce))
    assert codes(summed, logical) == {"Z406"}


@pytest.mark.parametrize(("is_late", "expected"), [(False, {"Z402"}), (True, set())])
def test_a_broadcast_of_one_ranks_gradient_is_no_sum(is_late: bool, expected: set[str]) -> None:
    """A reduced gradient is the same on every rank, so any rank may broadcast it."""
    program = Case(stage=0).scheduled
    place, reduce = the(program, ops.AllReduce, LAST_MICRO_STEP)
    tell = ops.Broadcast(pairs=reduce.pairs, comm=reduce.comm, stream=reduce.stream)
    new = (
        (replace(reduce, event=None), replace(tell, event=reduce.event))
        if is_late
        else (tell, reduce)
    )
    assert codes(put(program, place, *new)) == expected


def test_on_two_axes_slices_are_summed_over_the_other_one_and_stale_gradients_stay_unread() -> None:
    logical = Case(stage=3, precision="bf16").logical
    program = applied(logical, for_stage(3, 4, replicas=2))
    assert codes(program, logical) == set()
    scatter = the(program, ops.ReduceScatter, LAST_MICRO_STEP)[1]
    place, reduce = the(program, ops.AllReduce, LAST_MICRO_STEP)
    assert "Z402" in codes(put(program, place, replace(reduce, comm=scatter.comm)))
    stale = [
        b.name
        for b in program.buffers
        if isinstance(b.holds, FlatContent) and b.holds.micro is Micro.STALE
    ]
    copy = ops.Cast(
        source=Region(buffer=stale[0], offset=0, numel=16),
        destination=Region(buffer=stale[0], offset=16, numel=16),
        stream=COMPUTE,
    )
    section = [s.name for s in program.sections].index(LAST_MICRO_STEP)
    assert "Z402" in codes(edit(program, section, lambda body: body.insert(0, copy)))


def test_an_argument_has_the_layout_and_the_dtype_that_its_segment_has() -> None:
    program = Case(stage=0).scheduled
    place, compute = the(program, ops.Compute, LAST_MICRO_STEP)
    first, *others = compute.arguments
    view = first.view
    flat = replace(view, shape=(math.prod(view.shape), 1), stride=(1, 1))
    laid = replace(compute, arguments=(replace(first, view=flat), *others))
    assert "Z005" in codes(put(program, place, laid))
    activation = next(b for b in program.buffers if b.role is Role.ACTIVATION)
    halved = replace(activation, dtype=DType.BF16)
    buffers = tuple(halved if b is activation else b for b in program.buffers)
    assert "Z004" in codes(replace(program, buffers=buffers))
