"""What ranks do together in a program: which differences between two programs it shows, and which it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from examples import any_length
from tests.support.lowering import proved_for
from zeroir.config import make_options
from zeroir.frontend import load_model_file, trace
from zeroir.ir import ops
from zeroir.ir.analysis.schedules import shared_schedule
from zeroir.ir.buffers import Region
from zeroir.ir.program import LAST_MICRO_STEP, STEP_SECTIONS, Program
from zeroir.ir.text import parse

Body = list[ops.Op]


OPTIONS: dict[str, object] = {"stage": 3, "world_size": 2, "evaluate": False}


@cache
def logical(**options: object) -> Program:
    return trace(load_model_file(any_length.__file__), make_options({**OPTIONS, **options})).program


@pytest.fixture(scope="module")
def program() -> Program:
    return proved_for(logical(), make_options(OPTIONS))


def changed(program: Program, change: Callable[[Body], object]) -> Program:
    """Return the program after a change of the ops of its last micro-step."""
    sections = []
    for section in program.sections:
        body = list(section.body)
        if section.name == LAST_MICRO_STEP:
            change(body)
        sections.append(replace(section, body=tuple(body)))
    return replace(program, sections=tuple(sections))


def places(body: Body, kind: type[object]) -> list[int]:
    return [index for index, op in enumerate(body) if isinstance(op, kind)]


def swap_reductions(body: Body) -> None:
    first, second, *_ = places(body, ops.ReduceScatter)
    body[first], body[second] = body[second], body[first]


def swap_gathers(body: Body) -> None:
    first, *_, last = places(body, ops.Gather)
    body[first], body[last] = body[last], body[first]


def drop_a_gather(body: Body) -> None:
    del body[places(body, ops.Gather)[-1]]


def redirect_a_sum(body: Body) -> None:
    """Let what was reduced for one gradient update another one's parameters."""
    place = places(body, ops.OptimizerStep)[0]
    update = body[place]
    assert isinstance(update, ops.OptimizerStep)
    assert isinstance(update.grad, Region)
    body[place] = replace(update, grad=replace(update.grad, buffer="other"))


def another_wire(body: Body) -> None:
    place = places(body, ops.ReduceScatter)[0]
    op = body[place]
    assert isinstance(op, ops.ReduceScatter)
    body[place] = replace(op, reduction=ops.Reduction.MAX)


def without_segments(body: Body) -> None:
    body[:] = [op for op in body if not isinstance(op, ops.Compute | ops.Memory | ops.Wait)]


@pytest.mark.parametrize(
    "change", [swap_reductions, swap_gathers, drop_a_gather, redirect_a_sum, another_wire]
)
def test_what_ranks_do_together_in_another_way_shows(
    program: Program, change: Callable[[Body], object]
) -> None:
    other = program
    if change is redirect_a_sum:
        extra = replace(program.buffers[0], name="other")
        other = replace(program, buffers=(*program.buffers, extra))
    other = changed(other, change)
    assert shared_schedule(other, STEP_SECTIONS) != shared_schedule(program, STEP_SECTIONS)


def test_what_a_rank_does_alone_does_not_show(program: Program) -> None:
    own = shared_schedule(program, STEP_SECTIONS)
    assert own is not None
    assert shared_schedule(changed(program, without_segments), STEP_SECTIONS) == own
    shapes = {"shapes": "input_ids: _, n<=99; labels: _, n"}
    longer = proved_for(logical(**shapes), make_options({**OPTIONS, **shapes}))
    assert shared_schedule(longer, STEP_SECTIONS) == own
    stage_1 = proved_for(logical(), make_options({**OPTIONS, "stage": 1}))
    assert shared_schedule(stage_1, STEP_SECTIONS) != own


def test_a_program_that_gathers_before_its_first_section_has_no_schedule() -> None:
    program = parse(GATHERED)
    assert shared_schedule(program, [LAST_MICRO_STEP]) is None
    assert shared_schedule(program, ["update"]) is not None


GATHERED = """zeroir 1
mesh dp=2
comm gather axis=dp
flat a : f32[8] unit=a trainable {
  a : [8] offset=0
}
buffer %a.param : f32[4] device param = param a @dp
buffer %a.full : f32[8] device gathered
section last_micro_step {
  entry live %a.full
  entry %a.full = param a
   0: release %a.full stream=compute
}
section update {
}
"""
