"""Each parameter is updated with the settings of its group, as in the logical program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.edits import edit, mapped, put, the, with_buffers
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.schedules import Case
from tests.verify.test_values import FP32
from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import UPDATE, OptimizerGroup, Program, ScalarBinding
from zeroir.verify import verify


def in_two_groups(program: Program) -> Program:
    """The first flat trains with hyper-parameters of its own."""
    flat = program.flats[0]
    rest = OptimizerGroup(
        name="default",
        algorithm=program.groups[0].algorithm,
        intervals=tuple(i for i in program.groups[0].intervals if i[0] != flat.name),
        lr="lr",
        hyper="hyper",
    )
    own = replace(
        rest, name="own", intervals=((flat.name, 0, flat.padded_numel),), hyper="hyper.own"
    )
    hyper = program.buffer_by_name["hyper"]
    extra = replace(hyper, name="hyper.own", holds=NamedContent(name="hyper.own"))

    def told(op: Op) -> tuple[Op, ...]:
        if isinstance(op, ops.OptimizerStep) and op.param.buffer.startswith(flat.name):
            return (replace(op, hyper=whole(extra), group="own"),)
        return (op,)

    values = ScalarBinding(buffer="hyper.own", values=(0.9, 0.99, 1e-8, 0.0))
    program = replace(program, groups=(rest, own), scalars=(*program.scalars, values))
    return mapped(with_buffers(program, extra), told)


def exchanged(program: Program, *, has_labels: bool) -> Program:
    """Two optimizer steps exchange their hyper-parameters."""

    def told(op: Op) -> tuple[Op, ...]:
        if not isinstance(op, ops.OptimizerStep):
            return (op,)
        is_own = op.hyper.buffer == "hyper.own"
        is_second = op.param.buffer.startswith(program.flats[1].name)
        if not (is_own or is_second):
            return (op,)
        hyper = Region(buffer="hyper" if is_own else "hyper.own", offset=0, numel=4)
        group = "default" if is_own else "own"
        return (replace(op, hyper=hyper, group=group if has_labels else op.group),)

    return mapped(program, told)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_parameter_is_updated_as_its_group_says(stage: int) -> None:
    logical = in_two_groups(Case(stage=stage).logical)
    program = applied(logical, for_stage(stage, 3))
    assert verify(program, logical).is_valid
    for has_labels in (False, True):
        assert codes(exchanged(program, has_labels=has_labels)) == {"Z403"}


def test_a_step_belongs_to_a_group() -> None:
    program = FP32.scheduled
    place, step = the(program, ops.OptimizerStep, UPDATE)
    report = verify(put(program, place, replace(step, group="nobody")))
    assert codes(report) == {"Z403"}


def with_buffer(program: Program, like: str, name: str) -> Program:
    model = program.buffer_by_name[like]
    new = replace(model, name=name, role=Role.STAGING, holds=None)
    return replace(program, buffers=(*program.buffers, new))


def test_a_learning_rate_that_comes_back_after_the_steps_was_still_another() -> None:
    case = Case(stage=2)
    program = with_buffer(case.scheduled, "lr", "kept")
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
    assert codes(edit(program, at_update, restored), case.logical) == {"Z403"}
