"""Programs that compute another result, although every op is right by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.edits import at, edit, put
from tests.support.lowering import applied
from tests.support.schedules import Case
from tests.verify.test_joints import hybrid
from tests.verify.test_rejects import codes, find
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent, Micro, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, REDUCE
from zeroir.ir.ops import Op, Pair, Reduction
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    ModuleBufferBinding,
    OptimizerGroup,
    Program,
    ScalarBinding,
    Section,
)
from zeroir.ir.text import parse
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.pipelines import for_stage
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


# ------------------------------------------------------------------------------------------------- one launch


def test_pairs_of_one_launch_may_not_feed_each_other() -> None:
    """The pairs of a launch have no order: one may read before or after another one writes."""
    program = FP32.scheduled
    reduce = op_of(program, UPDATE, ops.AllReduce)
    assert isinstance(reduce, ops.AllReduce)
    norm = reduce.pairs[0].source
    chained = replace(reduce, pairs=(*reduce.pairs, Pair(source=norm, destination=LOSS)))
    chained = replace(chained, pairs=tuple(p for p in chained.pairs if p.source != LOSS))
    is_wanted = lambda op: isinstance(op, ops.AllReduce)  # noqa: E731
    assert codes(verify(changed(program, UPDATE, is_wanted, chained))) == {"Z010"}


def test_staging_over_what_is_read_later_is_found() -> None:
    program = FP32.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.ReduceScatter))
    scatter = at(program, place)
    assert isinstance(scatter, ops.ReduceScatter)
    staged = replace(scatter, staging=Region(buffer="input.x", offset=0, numel=8))
    report = verify(put(program, place, staged))
    assert codes(report) <= {"Z103", "Z105"}
    assert not report.is_valid


# ------------------------------------------------------------------------------------------------- on the wire


def on_wire(program: Program, section: str, kind: type, wire: DType) -> Program:
    place = find(program, section, lambda op: isinstance(op, kind))
    op = at(program, place)
    assert isinstance(op, ops.AllGather | ops.ReduceScatter | ops.AllReduce)
    return put(program, place, replace(op, wire_dtype=wire))


@pytest.mark.parametrize("wire", [DType.I32, DType.I64])
def test_numbers_do_not_travel_as_integers(wire: DType) -> None:
    program = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.AllGather, wire)
    assert codes(verify(program)) == {"Z004"}


@pytest.mark.parametrize(("case", "wire"), [(FP32, DType.BF16), (FP16, DType.BF16)])
def test_a_parameter_that_was_rounded_on_the_wire_is_another(case: Case, wire: DType) -> None:
    program = on_wire(case.scheduled, LAST_MICRO_STEP, ops.AllGather, wire)
    assert codes(verify(program)) == {"Z401"}


def test_a_norm_that_was_rounded_on_the_wire_is_no_norm() -> None:
    program = on_wire(FP32.scheduled, UPDATE, ops.AllReduce, DType.BF16)
    assert codes(verify(program)) == {"Z402", "Z405"}  # the loss, too, is another number


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
    assert codes(verify(program, FP32.logical)) == {"Z406"}
    gathered = on_wire(FP32.scheduled, LAST_MICRO_STEP, ops.AllGather, DType.F64)
    assert verify(gathered, FP32.logical).is_valid


def test_sums_over_micro_steps_travel_in_fp32() -> None:
    case = Case(stage=1, precision="bf16", micro_steps=2)
    program = on_wire(case.scheduled, LAST_MICRO_STEP, ops.ReduceScatter, DType.BF16)
    assert codes(verify(program, case.logical)) == {"Z406"}


# --------------------------------------------------------------------------------------------------------- loss


def test_a_loss_that_nobody_reduces_is_no_matter() -> None:
    """The engine then averages it."""
    program = FP32.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.AllReduce))
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    without = replace(reduce, pairs=tuple(p for p in reduce.pairs if p.source != LOSS))
    assert verify(put(program, place, without), FP32.logical).is_valid


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
        assert codes(report) == {"Z402"}
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
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.AllReduce))
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    part = Region(buffer=reduce.pairs[0].source.buffer, offset=0, numel=6, shard=shard)
    fill = ops.Fill(destination=part, value=0.0, stream=reduce.stream)
    assert codes(verify(put(program, place, fill, reduce))) == {"Z402"}
    assert codes(verify(put(program, place, reduce, fill))) == {"Z402"}


# -------------------------------------------------------------------------------------------------- optimizer groups


def in_two_groups(program: Program) -> Program:
    """The first flat trains with hyper-parameters of its own."""
    flat = program.flats[0]
    rest = OptimizerGroup(
        name="default",
        algorithm=program.groups[0].algorithm,
        intervals=tuple(i for i in program.groups[0].intervals if i[0] != flat.name),
    )
    own = replace(rest, name="own", intervals=((flat.name, 0, flat.padded_numel),))
    hyper = program.buffer_by_name["hyper"]
    extra = replace(hyper, name="hyper.own", holds=NamedContent(name="hyper.own"))

    def told(op: Op) -> Op:
        if isinstance(op, ops.OptimizerStep) and op.param.buffer.startswith(flat.name):
            return replace(op, hyper=whole(extra), group="own")
        return op

    return replace(
        program,
        groups=(rest, own),
        buffers=(*program.buffers, extra),
        scalars=(
            *program.scalars,
            ScalarBinding(buffer="hyper.own", values=(0.9, 0.99, 1e-8, 0.0)),
        ),
        sections=tuple(replace(s, body=tuple(map(told, s.body))) for s in program.sections),
    )


def exchanged(program: Program, *, has_labels: bool) -> Program:
    """Two optimizer steps exchange their hyper-parameters."""

    def told(op: Op) -> Op:
        if not isinstance(op, ops.OptimizerStep):
            return op
        is_own = op.hyper.buffer == "hyper.own"
        is_second = op.param.buffer.startswith(program.flats[1].name)
        if not (is_own or is_second):
            return op
        hyper = Region(buffer="hyper" if is_own else "hyper.own", offset=0, numel=4)
        group = "default" if is_own else "own"
        return replace(op, hyper=hyper, group=group if has_labels else op.group)

    return replace(
        program, sections=tuple(replace(s, body=tuple(map(told, s.body))) for s in program.sections)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_parameter_is_updated_as_its_group_says(stage: int) -> None:
    logical = in_two_groups(Case(stage=stage).logical)
    program = applied(logical, for_stage(stage, 3))
    assert verify(program, logical).is_valid
    unlabelled = verify(exchanged(program, has_labels=False), logical)
    assert codes(unlabelled) == {"Z406"}
    assert "pre.weight is updated by" in " ".join(f.sentence for f in unlabelled.findings)
    assert codes(verify(exchanged(program, has_labels=True))) == {"Z403"}


def test_a_step_belongs_to_a_group() -> None:
    program = FP32.scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.OptimizerStep))
    step = at(program, place)
    assert isinstance(step, ops.OptimizerStep)
    report = verify(put(program, place, replace(step, group="nobody")))
    assert codes(report) == {"Z403"}


def with_buffer(program: Program, like: str, name: str) -> Program:
    model = program.buffer_by_name[like]
    new = replace(model, name=name, role=Role.STAGING, holds=None)
    return replace(program, buffers=(*program.buffers, new))


@pytest.mark.parametrize(("is_declared", "code"), [(True, "Z403"), (False, "Z406")])
def test_a_learning_rate_that_comes_back_after_the_steps_was_still_another(
    is_declared: bool, code: str
) -> None:
    case = Case(stage=2)
    program = with_buffer(case.scheduled, "lr", "kept")
    if not is_declared:
        groups = tuple(replace(group, lr=None, hyper=None) for group in program.groups)
        program = replace(program, groups=groups)
    other = replace(program.buffer_by_name["lr"], name="other", holds=NamedContent(name="other"))
    program = replace(
        program,
        buffers=(*program.buffers, other),
        scalars=(*program.scalars, ScalarBinding(buffer="other", values=(1.0,))),
    )
    lr, kept, spare = (Region(buffer=name, offset=0, numel=1) for name in ("lr", "kept", "other"))

    def restored(body: list[Op]) -> None:
        body[:0] = [
            ops.Alloc(buffer="kept", stream=COMPUTE),
            ops.Cast(source=lr, destination=kept, stream=COMPUTE),
            ops.Cast(source=spare, destination=lr, stream=COMPUTE),
        ]
        body += [
            ops.Cast(source=kept, destination=lr, stream=COMPUTE),
            ops.Release(buffer="kept", stream=COMPUTE),
        ]

    at_update = [s.name for s in program.sections].index(UPDATE)
    assert codes(verify(edit(program, at_update, restored), case.logical)) == {code}


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
    assert "Z405" in codes(verify(appended(Case(stage=2).scheduled, UPDATE, copy)))


@pytest.mark.parametrize("section", [LAST_MICRO_STEP, EVALUATE])
def test_only_the_update_takes_a_step(section: str) -> None:
    program = parse((GATES / "evaluate.zir").read_text())
    decide = op_of(program, UPDATE, ops.Decide)
    assert codes(verify(appended(program, section, decide))) >= {"Z405"}


def test_inputs_and_first_values_are_those_of_the_logical_program() -> None:
    case = Case(stage=2)
    program = case.scheduled
    (binding,) = program.inputs
    other = tuple(
        replace(b, holds=NamedContent(name="other")) if b.name == binding.buffer else b
        for b in program.buffers
    )
    elsewhere = replace(program, buffers=other)
    assert "Z406" in codes(verify(elsewhere, case.logical))
    faster = tuple(replace(s, values=(1.0,)) if s.buffer == "lr" else s for s in program.scalars)
    assert codes(verify(replace(program, scalars=faster), case.logical)) == {"Z406"}
    unset = tuple(s for s in program.scalars if s.buffer != "lr")
    assert codes(verify(replace(program, scalars=unset), case.logical)) == {"Z406"}


def test_two_inputs_are_two_values() -> None:
    program = Case(stage=0).scheduled
    (binding,) = program.inputs
    twin = replace(program.buffer_by_name[binding.buffer], name="twin")
    same = replace(
        program,
        buffers=(*program.buffers, twin),
        inputs=(binding, replace(binding, path="twin", buffer="twin")),
    )
    assert codes(verify(same)) == {"Z008"}


# ----------------------------------------------------------------------------------- order of three contributions


def with_three_contributions(program: Program, *, is_swapped: bool) -> Program:
    """The first parameter's gradient gets a third contribution, before or after the second."""
    place = find(
        program,
        LAST_MICRO_STEP,
        lambda op: isinstance(op, ops.Compute) and op.segment == "pre.backward",
    )
    second = at(program, place)
    assert isinstance(second, ops.Compute)
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
        place = find(
            program,
            LAST_MICRO_STEP,
            lambda op: isinstance(op, ops.Compute) and op.segment == "pre.backward",
        )
        op = at(program, place)
        assert isinstance(op, ops.Compute)
        return put(program, place, replace(op, event=None), op)

    logical = repeated(case.logical)
    assert verify(logical).is_valid
    program = applied(logical, for_stage(0, 3))
    assert verify(program, logical).is_valid
    assert codes(verify(program, case.logical)) == {"Z406"}
    assert codes(verify(repeated(case.scheduled), case.logical)) == {"Z406"}
    assert codes(verify(repeated(case.scheduled))) == {"Z402"}


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

    def bound(op: Op) -> Op:
        if not isinstance(op, ops.Compute) or op.segment != segment.name:
            return op
        (destination,) = op.destinations
        assert destination is not None
        view = replace(destination.view, stride=flipped.stride)
        return replace(op, destinations=(replace(destination, view=view),))

    found = replace(
        program,
        segments=tuple(turned if s is segment else s for s in program.segments),
        sections=tuple(replace(s, body=tuple(map(bound, s.body))) for s in program.sections),
    )
    report = verify(found)
    assert codes(report) == {"Z005"}
    assert "row-major" in report.findings[0].sentence


def test_a_result_fills_its_destination() -> None:
    """Elements that a result leaves out would count as written."""
    program = Case(stage=0).scheduled
    buffers = tuple(
        replace(b, numel=b.numel * 2) if b.name == "h.0" else b for b in program.buffers
    )

    def widened(op: Op) -> Op:
        if not isinstance(op, ops.Compute):
            return op
        destinations = tuple(
            replace(d, view=replace(d.view, region=replace(d.view.region, numel=16)))
            if d is not None and d.view.region.buffer == "h.0"
            else d
            for d in op.destinations
        )
        return replace(op, destinations=destinations)

    found = replace(
        program,
        buffers=buffers,
        sections=tuple(replace(s, body=tuple(map(widened, s.body))) for s in program.sections),
    )
    report = verify(found)
    assert codes(report) == {"Z005"}
    assert "leaves 8 of the elements of %h.0 unwritten" in report.findings[0].sentence


def test_a_stream_must_be_able_to_do_its_ops() -> None:
    program = Case(stage=0).scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.OptimizerStep))
    step = at(program, place)
    assert isinstance(step, ops.OptimizerStep)
    assert "Z006" in codes(verify(put(program, place, replace(step, stream="optimizer"))))


# --------------------------------------------------------------------------------------------- micro-steps, divisors


@pytest.mark.parametrize("divisor", [1, 2, 3, 9, 12])
def test_gradients_are_divided_by_ranks_times_micro_steps(divisor: int) -> None:
    program = replace(BF16, has_fixed_divisor=True).scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, ops.Decide))
    decide = at(program, place)
    assert isinstance(decide, ops.Decide)
    assert decide.divisor == 6
    assert codes(verify(put(program, place, replace(decide, divisor=divisor)))) == {"Z402"}


@pytest.mark.parametrize("micro_steps", ["1", "3", "many", None])
def test_the_number_of_micro_steps_is_the_one_divided_by(micro_steps: str | None) -> None:
    program = replace(BF16, has_fixed_divisor=True).scheduled
    options = tuple((k, v) for k, v in program.options if k != "micro_steps")
    if micro_steps is not None:
        options = (*options, ("micro_steps", micro_steps))
    report = verify(replace(program, options=options))
    assert codes(report) == {"Z402"}
    single = Case(stage=2).scheduled
    options = (*(o for o in single.options if o[0] != "micro_steps"), ("micro_steps", "2"))
    assert codes(verify(replace(single, options=options))) == {"Z402"}


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
            eval_loss="eval_loss",
            buffers=(*program.buffers, loss),
            options=(("micro_steps", "2" if len(sections) == 3 else "1"),),
        )
        report = verify(found)
        assert any(
            f.code == "Z402" and f.section == EVALUATE and name in f.sentence
            for f in report.findings
        )


def test_an_evaluation_leaves_running_statistics_alone() -> None:
    program = parse((GATES / "evaluate.zir").read_text())
    statistic = Buffer(
        name="mean",
        dtype=DType.F32,
        numel=4,
        space=Space.DEVICE,
        role=Role.MODULE_BUFFER,
        holds=NamedContent(name="mean"),
    )
    binding = ModuleBufferBinding(name="mean", buffer="mean", shape=(4,))
    program = replace(program, buffers=(*program.buffers, statistic), module_buffers=(binding,))
    fill = ops.Fill(destination=whole(statistic), value=1.0, stream=COMPUTE)
    assert verify(appended(program, LAST_MICRO_STEP, fill)).is_valid
    assert codes(verify(appended(program, EVALUATE, fill))) == {"Z103"}


@pytest.mark.parametrize("section", [LAST_MICRO_STEP, UPDATE])
def test_a_value_is_summed_over_no_more_axes_than_in_the_logical_program(section: str) -> None:
    """Such as running statistics: their sum over ranks is another value."""
    case = Case(stage=1, ranks=2)
    statistic = Buffer(
        name="mean",
        dtype=DType.F32,
        numel=4,
        space=Space.DEVICE,
        role=Role.MODULE_BUFFER,
        holds=NamedContent(name="mean"),
    )
    binding = ModuleBufferBinding(name="mean", buffer="mean", shape=(4,))
    logical, program = (
        replace(p, buffers=(*p.buffers, statistic), module_buffers=(binding,))
        for p in (case.logical, case.scheduled)
    )
    assert verify(program, logical).is_valid
    pair = Pair(source=whole(statistic), destination=whole(statistic))
    reduce = ops.AllReduce(pairs=(pair,), comm="reduce", stream=REDUCE)
    summed = derive_waits(appended(without_waits(program), section, reduce))
    assert codes(verify(summed, logical)) == {"Z406"}


# --------------------------------------------------------------------------------------------------- two axes


def test_a_gradient_summed_twice_over_an_axis_is_found() -> None:
    program, logical = hybrid()
    assert verify(program, logical).is_valid
    place = find(
        program,
        LAST_MICRO_STEP,
        lambda op: isinstance(op, ops.AllReduce) and op.comm == "replicas",
    )
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    twice = put(program, place, replace(reduce, event=None), reduce)
    assert codes(verify(twice)) == {"Z402"}
    wrong = put(program, place, replace(reduce, comm="reduce"))
    assert "Z402" in codes(verify(wrong)) or "Z202" in codes(verify(wrong))


@pytest.mark.parametrize(("is_late", "expected"), [(False, {"Z402"}), (True, set())])
def test_a_broadcast_of_one_ranks_gradient_is_no_sum(is_late: bool, expected: set[str]) -> None:
    """A reduced gradient is the same on every rank, so any rank may broadcast it."""
    program = Case(stage=0).scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.AllReduce))
    reduce = at(program, place)
    assert isinstance(reduce, ops.AllReduce)
    tell = ops.Broadcast(pairs=reduce.pairs, comm=reduce.comm, stream=reduce.stream)
    new = (
        (replace(reduce, event=None), replace(tell, event=reduce.event))
        if is_late
        else (tell, reduce)
    )
    assert codes(verify(put(program, place, *new))) == expected


def test_stale_gradients_stay_unread_on_every_axis() -> None:
    program, _ = hybrid()
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
    report = verify(edit(program, section, lambda body: body.insert(0, copy)))
    assert "Z402" in codes(report)
