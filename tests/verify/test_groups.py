"""Optimizer groups: each element is updated once, with the settings and the algorithm of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import at, places, put, the
from tests.support.groups import in_groups
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.schedules import Case
from zeroir.config import make_options
from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.ops import Algorithm, Op
from zeroir.ir.program import UPDATE, OptimizerGroup, Program
from zeroir.ir.text import parse, print_program
from zeroir.passes.pipelines import for_options
from zeroir.report.schedule import schedule
from zeroir.verify import verify

LOGICAL = in_groups(Case(stage=0).logical)
SCHEDULED = applied(LOGICAL, for_stage(3, 3))


def changed(change: Callable[[ops.OptimizerStep], Op]) -> Program:
    """The scheduled program with its first step of two groups changed."""
    place, step = the(SCHEDULED, ops.OptimizerStep, is_wanted=lambda op: bool(op.others))
    return put(SCHEDULED, place, change(step))


def regrouped(*groups: OptimizerGroup) -> Program:
    return replace(SCHEDULED, groups=groups)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_within_a_flat_are_proved_at_every_stage(stage: int, precision: str) -> None:
    logical = in_groups(Case(stage=stage, precision=precision).logical)
    options = make_options({"stage": stage, "world_size": 3, "precision": precision})
    program = applied(logical, for_options(options))
    assert verify(program, logical).findings == ()
    assert sum(bool(op.others) for op in program.ops() if isinstance(op, ops.OptimizerStep)) > 1
    assert parse(print_program(program)) == program


def test_the_schedule_tells_the_number_of_groups() -> None:
    rows = schedule(LOGICAL, LOGICAL.section_by_name[UPDATE])
    details = [row.detail for row in rows if row.op == "optimizer_step"]
    assert sum(detail.endswith(" in 2 groups") for detail in details) == len(details) - 2


def test_groups_within_a_flat_are_proved_on_a_hybrid_mesh() -> None:
    options = make_options({"mesh": "replicate=2,shard=2"})
    program = applied(LOGICAL, for_options(options))
    assert verify(program, LOGICAL).findings == ()


def test_groups_grow_with_the_padding_of_their_flats() -> None:
    for group in SCHEDULED.groups:
        for name, _, stop in group.intervals:
            last = max(slot.offset for slot in SCHEDULED.flat_by_name[name].slots)
            assert stop <= last or stop == SCHEDULED.flat_by_name[name].padded_numel


def _exchanged(step: ops.OptimizerStep, *fields: str) -> Op:
    """The two groups of a step exchange some of their settings."""
    (other,) = step.others
    first = replace(step, **{field: getattr(other, field) for field in fields})
    second = replace(other, **{field: getattr(step, field) for field in fields})
    return replace(first, others=(second,))


@pytest.mark.parametrize("fields", [("lr",), ("hyper",), ("lr", "hyper"), ("group",)], ids="+".join)
def test_a_group_has_its_own_settings(fields: tuple[str, ...]) -> None:
    """Without the logical program, too: a group declares its settings."""
    program = changed(lambda step: _exchanged(step, *fields))
    assert codes(program) == {"Z403"}


def test_settings_may_stand_in_any_order() -> None:
    program = changed(lambda step: _exchanged(step, "group", "lr", "hyper"))
    assert verify(program, LOGICAL).is_valid


def test_the_settings_of_every_group_are_needed() -> None:
    report = verify(changed(lambda step: replace(step, others=())))
    assert codes(report) == {"Z403"}
    assert "of group own, but has no settings for that group" in report.findings[0].sentence


def test_settings_are_given_once() -> None:
    report = verify(changed(lambda step: replace(step, others=(*step.others, *step.others))))
    assert codes(report) == {"Z403"}


def test_an_unknown_group_is_refused() -> None:
    def unknown(step: ops.OptimizerStep) -> Op:
        return replace(step, others=(replace(step.others[0], group="nobody"),))

    assert codes(changed(unknown)) == {"Z403"}


def test_an_interval_that_is_given_twice_is_refused() -> None:
    default, own = SCHEDULED.groups
    twice = replace(default, intervals=(*default.intervals, own.intervals[0]))
    report = verify(regrouped(twice, own))
    assert codes(report) == {"Z403"}
    assert "is in group" in report.findings[0].sentence
    again = replace(own, intervals=(*own.intervals, own.intervals[0]))
    assert codes(regrouped(default, again)) == {"Z403"}


def test_every_updated_parameter_is_in_a_group() -> None:
    default, own = SCHEDULED.groups
    report = verify(regrouped(default, replace(own, intervals=own.intervals[1:])))
    assert codes(report) == {"Z403"}
    assert "which is in no group" in report.findings[0].sentence


def test_a_group_that_moves_is_another_than_in_the_logical_program() -> None:
    default, own = SCHEDULED.groups
    (flat, start, stop), *others = own.intervals
    rest = tuple(
        (name, a, stop) if (name, b) == (flat, start) else (name, a, b)
        for name, a, b in default.intervals
    )
    program = regrouped(replace(default, intervals=rest), replace(own, intervals=tuple(others)))
    assert verify(program).is_valid
    assert codes(program, LOGICAL) == {"Z406"}


def test_a_group_trains_with_its_own_algorithm() -> None:
    default, own = SCHEDULED.groups
    report = verify(regrouped(default, replace(own, algorithm=Algorithm.ADAM)))
    assert codes(report) == {"Z403"}


def test_intervals_are_whole_vectors() -> None:
    default, own = SCHEDULED.groups
    (flat, start, stop), *others = own.intervals
    less = replace(own, intervals=((flat, start, stop - 8), *others))
    assert codes(regrouped(default, less)) >= {"Z003"}


@pytest.mark.parametrize("field", ["lr", "hyper"])
def test_settings_stand_in_declared_buffers(field: str) -> None:
    default, own = SCHEDULED.groups
    wrong = {"lr": replace(own, lr="none"), "hyper": replace(own, hyper="none")}[field]
    assert codes(regrouped(default, wrong)) == {"Z001"}
    assert codes(regrouped(default, own, own)) >= {"Z002"}


def test_a_step_of_two_groups_works_on_elements_at_rest() -> None:
    """The runtime finds the group of an element by its place, so the elements may not stand elsewhere."""
    place, step = the(SCHEDULED, ops.OptimizerStep, is_wanted=lambda op: bool(op.others))
    like = SCHEDULED.buffer_by_name[step.param.buffer]
    aside = replace(like, name="aside", holds=None)
    there = Region(buffer="aside", offset=0, numel=aside.numel)
    program = replace(SCHEDULED, buffers=(*SCHEDULED.buffers, aside))
    program = put(
        program,
        place,
        ops.Alloc(buffer="aside", stream=step.stream),
        ops.Cast(source=step.param, destination=there, stream=step.stream),
        replace(step, param=there),
        ops.Cast(source=there, destination=step.param, stream=step.stream),
        ops.Release(buffer="aside", stream=step.stream),
    )
    report = verify(program)
    assert "does not hold the elements that rest there" in " ".join(
        finding.sentence for finding in report.findings
    )


@pytest.mark.parametrize("is_grouped", [True, False])
def test_elements_are_stepped_where_they_rest(is_grouped: bool) -> None:
    """The runtime finds groups and padding by the places of elements, also where a step has one group's settings."""
    program = Case(stage=0, is_grouped=is_grouped).scheduled
    place, step = next(
        (place, op)
        for place in places(program, lambda op: isinstance(op, ops.OptimizerStep))
        if isinstance(op := at(program, place), ops.OptimizerStep)
        and op.param.buffer == "root.post.param"
    )
    elsewhere = replace(step.param, buffer="blocks.0.param")
    aside = replace(step.param, buffer="aside")
    buffer = replace(program.buffer_by_name["blocks.0.param"], name="aside", holds=None)
    moved = put(
        replace(program, buffers=(*program.buffers, buffer)),
        place,
        ops.Alloc(buffer="aside", stream=step.stream),
        ops.Cast(source=elsewhere, destination=aside, stream=step.stream),
        ops.Cast(source=step.param, destination=elsewhere, stream=step.stream),
        replace(step, param=elsewhere, event=None),
        ops.Cast(source=elsewhere, destination=step.param, stream=step.stream, event=step.event),
        ops.Cast(source=aside, destination=elsewhere, stream=step.stream),
        ops.Release(buffer="aside", stream=step.stream),
    )
    report = verify(moved)
    assert codes(report) == {"Z403"}
    assert "does not hold the elements that rest there" in report.findings[0].sentence


@pytest.mark.parametrize(
    ("optimizer", "is_valid"), [("adamw", True), ("adafactor", False)], ids=["adamw", "adafactor"]
)
def test_an_optimizer_of_whole_parameters_has_no_group_of_a_part(
    optimizer: str, is_valid: bool
) -> None:
    """The runtime takes the group of a parameter's first element."""
    program = mlp(dim=16, optimizer=optimizer)
    (default,) = program.groups
    settings = ops.GroupSettings(
        group="own", lr=_whole(program, "lr"), hyper=_whole(program, "hyper")
    )
    intervals = [(flat.name, 0, 64) for flat in program.flats]
    rest = [(flat.name, 64, flat.padded_numel) for flat in program.flats]
    program = replace(
        program,
        groups=(
            replace(default, intervals=tuple(intervals)),
            replace(default, name="own", intervals=tuple(rest)),
        ),
    )
    for place in places(program, lambda op: isinstance(op, ops.Direction | ops.OptimizerStep)):
        step = at(program, place)
        assert isinstance(step, ops.Direction | ops.OptimizerStep)
        program = put(program, place, replace(step, others=(settings,)))
    report = verify(program)
    assert report.is_valid is is_valid, report.render()
    assert is_valid or "takes whole parameters" in report.findings[0].sentence


def _whole(program: Program, name: str) -> Region:
    return whole(program.buffer_by_name[name])
