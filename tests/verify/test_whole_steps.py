"""The laws of optimizers that work on whole parameters: every rank has all directions, each state moves once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.edits import at, put, the
from tests.support.lowering import codes
from tests.support.programs import mlp
from tests.support.schedules import Case
from tests.verify.test_rejects import find
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import UPDATE, Program
from zeroir.verify import verify

CASES = [
    Case(stage=0, optimizer="adafactor", tied=True),
    Case(stage=1, optimizer="adafactor", precision="fp16", clip=1.0),
    Case(stage=2, optimizer="adafactor", precision="bf16", micro_steps=2),
    Case(stage=3, optimizer="adafactor", keep_fp32=True, precision="bf16"),
]
SHARDED = CASES[1:]
TRAPS = "tests/support/models/traps.py"


def gathers_directions(op: ops.AllGather) -> bool:
    return any(pair.destination.buffer.endswith(".direction") for pair in op.pairs)


def sentences(program: Program) -> str:
    return " ".join(finding.sentence for finding in verify(program).findings)


@pytest.mark.parametrize("case", CASES)
def test_whole_steps_are_proved(case: Case) -> None:
    report = verify(case.scheduled, case.logical)
    assert report.is_valid, report.render()


@pytest.mark.parametrize("case", SHARDED)
def test_directions_that_nobody_gathers_are_found(case: Case) -> None:
    place, gather = the(case.scheduled, ops.AllGather, is_wanted=gathers_directions)
    without = replace(gather, pairs=gather.pairs[1:])
    assert verify(put(case.scheduled, place, without)).findings


@pytest.mark.parametrize("case", SHARDED)
def test_parameters_of_one_rank_alone_are_not_the_whole(case: Case) -> None:
    place, step = the(case.scheduled, ops.OptimizerStep)
    mutant = put(case.scheduled, place, replace(step, whole=None))
    assert "reads whole parameters" in sentences(mutant)


@pytest.mark.parametrize("case", SHARDED)
def test_directions_of_another_flat_are_found(case: Case) -> None:
    place, step = the(case.scheduled, ops.OptimizerStep, UPDATE, 0)
    _, like = the(case.scheduled, ops.OptimizerStep, UPDATE, 1)
    # Where the other flat is gathered later, the order is wrong already.
    for mutant in (replace(step, whole=like.whole), replace(step, grad=like.grad)):
        assert codes(put(case.scheduled, place, mutant)) <= {"Z101", "Z103", "Z403"}
        assert not verify(put(case.scheduled, place, mutant)).is_valid


@pytest.mark.parametrize("case", CASES)
def test_the_factors_of_another_flat_are_found(case: Case) -> None:
    place, step = the(case.scheduled, ops.OptimizerStep, UPDATE, 0)
    _, like = the(case.scheduled, ops.OptimizerStep, UPDATE, 1)
    assert "Z403" in codes(put(case.scheduled, place, replace(step, factors=like.factors)))


@pytest.mark.parametrize("case", CASES)
def test_a_direction_computed_twice_is_found(case: Case) -> None:
    place, op = the(case.scheduled, ops.Direction)
    twice = put(case.scheduled, place, replace(op, event=None), op)
    assert "Z402" in codes(twice)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_no_direction(case: Case) -> None:
    """It is not divided, though it has the same elements and dtype."""
    place, op = the(case.scheduled, ops.Direction)
    wrong = ops.Cast(source=op.grad, destination=op.direction, stream=op.stream, event=op.event)
    assert codes(put(case.scheduled, place, wrong)) & {"Z402", "Z403"}


@pytest.mark.parametrize("kind", [ops.Direction, ops.OptimizerStep])
def test_the_decision_to_skip_is_not_ignored(
    kind: type[ops.Direction] | type[ops.OptimizerStep],
) -> None:
    program = CASES[1].scheduled
    place = find(program, UPDATE, lambda op: isinstance(op, kind))
    op = at(program, place)
    assert isinstance(op, ops.Direction | ops.OptimizerStep)
    mutant = put(program, place, replace(op, skip=None))
    assert "Z405" in codes(mutant)


def test_muon_takes_matrices_alone() -> None:
    """The small model has biases."""
    assert "muon, which takes matrices alone" in sentences(mlp(optimizer="muon"))


def test_an_elementwise_optimizer_has_no_direction() -> None:
    program = CASES[0].scheduled
    place, op = the(program, ops.Direction)
    mutant = put(program, place, replace(op, algorithm=Algorithm.SGD))
    assert "has no direction" in sentences(mutant)


def test_factors_are_declared_with_their_size() -> None:
    program = CASES[3].scheduled
    buffers = (
        replace(b, numel=b.numel + 1) if b.name.endswith(".factors") else b for b in program.buffers
    )
    longer = replace(program, buffers=tuple(buffers))
    assert "holds elements [0:13] of flat blocks.0, which has 12" in sentences(longer)


def test_a_part_of_the_factors_is_not_enough() -> None:
    place, step = the(CASES[0].scheduled, ops.OptimizerStep)
    assert step.factors is not None
    part = Region(buffer=step.factors.buffer, offset=0, numel=step.factors.numel - 1)
    mutant = put(CASES[0].scheduled, place, replace(step, factors=part))
    assert "needs factors of the whole flat" in sentences(mutant)


@pytest.mark.slow
def test_preconditioners_are_moved_where_they_rest() -> None:
    """The runtime finds the sums of a parameter by their places in the buffer at rest."""
    program = compile_with(TRAPS, make_options({"stage": 0, "optimizer": "shampoo"})).logical
    place, step = the(program, ops.OptimizerStep, is_wanted=lambda op: op.factors is not None)
    factors = step.factors
    assert factors is not None
    like = program.buffer_by_name[factors.buffer]
    aside = replace(factors, buffer="aside")
    moved = put(
        replace(program, buffers=(*program.buffers, replace(like, name="aside", holds=None))),
        place,
        ops.Alloc(buffer="aside", stream=step.stream),
        ops.Cast(source=factors, destination=aside, stream=step.stream),
        replace(step, factors=aside),
        ops.Cast(source=aside, destination=factors, stream=step.stream),
        ops.Release(buffer="aside", stream=step.stream),
    )
    assert "are not this rank's preconditioners" in sentences(moved)
