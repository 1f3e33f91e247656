"""An update that overlaps the backward computes the same, and nothing makes it later than it need be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.example_programs import LOGICAL
from tests.passes.numbers import assert_same, inputs, run
from tests.passes.strategies import Case, cases
from tests.passes.variants import called_twice, frozen
from tests.support.covering import covering
from tests.support.edits import with_body
from tests.support.examples import examples
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.ir import ops
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program, State
from zeroir.passes import manager
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.update_streams import BESIDE
from zeroir.passes.manager import apply
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import for_options
from zeroir.verify import verify


def _without_global_decision(case: Case) -> Case:
    precision = "fp32" if case.precision == "fp16" else case.precision
    return replace(case, precision=precision, clip=None)


FREE = cases(world_sizes=(1, 3)).map(_without_global_decision)


@cache
def _overlapped(stage: int, *, tied: bool = False, micro_steps: int = 1) -> Program:
    logical = mlp(tied=tied, micro_steps=micro_steps, optimizer="momentum")
    return applied(logical, for_stage(stage, 3, overlap_update=True))


# -------------------------------------------------------------------------------------------------------- numbers


@examples(4)
@given(FREE, st.integers(0, 2**16))
def test_it_computes_the_same(case: Case, schedule_seed: int) -> None:
    before = applied(case.logical(), case.passes())
    after = manager.run(before, [OverlapUpdate()], reference=case.logical())
    result = assert_same(after, before, case.micro_steps, [schedule_seed])
    assert any(value.abs().sum() > 0 for value in result.state.values())


FAST = ((0, "adamw", 1), (1, "sgd", 3), (2, "momentum", 1), (3, "adamw", 3))
"""One case a stage for every day."""


@pytest.mark.parametrize(
    ("stage", "optimizer", "micro_steps"),
    [
        *FAST,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in covering(
                list(product(range(4), ("sgd", "momentum", "adamw"), (1, 3))), tuple
            )
            if case not in FAST
        ),
    ],
)
def test_every_optimizer_computes_the_same_with_tied_weights(
    stage: int, optimizer: str, micro_steps: int
) -> None:
    precision = "bf16" if micro_steps == 3 else "fp32"
    logical = mlp(tied=True, optimizer=optimizer, micro_steps=micro_steps, precision=precision)
    before = applied(logical, for_stage(stage, 3))
    after = manager.run(before, [OverlapUpdate()], reference=logical)
    assert_same(after, before, micro_steps, [5])


@pytest.mark.parametrize("make", [frozen, pytest.param(called_twice, marks=pytest.mark.slow)])
def test_frozen_parameters_and_units_called_twice_train_as_before(
    make: Callable[[], Program],
) -> None:
    for stage in range(4):
        program = proved(make(), for_stage(stage, 3, overlap_update=True))
        assert_same(program, applied(make(), for_stage(0, 3)), seeds=[3])


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))]
)
def test_groups_of_ranks_with_the_same_shards_compute_the_same(stage: int) -> None:
    logical = mlp(precision="bf16", keep_fp32=True)
    passes = for_stage(stage, 4, replicas=2, bucket=9_000, overlap_update=True)
    plain = applied(logical, for_stage(stage, 4, replicas=2))
    assert_same(proved(logical, passes), plain, seeds=[2])


def test_a_step_tells_what_it_told_before() -> None:
    logical = mlp()
    batches = inputs(logical, 3, 1)
    told, overlapped = (
        run(applied(logical, for_stage(2, 3, overlap_update=is_overlapped)), batches).told
        for is_overlapped in (False, True)
    )
    assert told == overlapped
    assert all(of_rank.keys() == {"mean_loss", "weight"} for step in told for of_rank in step)
    assert all(of_rank["mean_loss"] > 0 for step in told for of_rank in step)


# ------------------------------------------------------------------------------------------------------- schedule


@examples(8)
@given(FREE)
def test_what_must_be_ordered_is_and_no_wait_is_idle(case: Case) -> None:
    program = apply(OverlapUpdate(), case.scheduled())
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert happens.unordered(body, program) == []
    assert derive_waits(program) == program


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_step_delays_neither_computation_nor_reduction(stage: int, micro_steps: int) -> None:
    program = _overlapped(stage, micro_steps=micro_steps)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    steps = sum(1 << i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep))
    assert steps.bit_count() == len(program.flats)
    for index, op in enumerate(body):
        if isinstance(op, ops.Compute | ops.ReduceScatter | ops.AllReduce):
            assert not masks[index] & steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_waits_for_its_gradient_and_for_no_other_computation(stage: int, tied: bool) -> None:
    """Of the backward, all that stands later in the program may still be to come."""
    program = _overlapped(stage, tied=tied)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    computes = [i for i, op in enumerate(body) if isinstance(op, ops.Compute)]
    for index, op in enumerate(body):
        if isinstance(op, ops.OptimizerStep):
            last = max(i for i in computes if _touches_flat(body[i], op, program))
            assert masks[index] >> last & 1
            assert not any(masks[index] >> i & 1 for i in computes if i > last)


def _touches_flat(compute: Op, step: ops.OptimizerStep, program: Program) -> bool:
    """Whether a compute op reads the step's parameters or contributes to their gradient."""
    assert isinstance(compute, ops.Compute)
    named = [argument.parameter for argument in compute.arguments]
    named += [d.gradient for d in compute.destinations if d is not None]
    homes = {program.parameter_by_name[name][0].name for name in named if name is not None}
    return step.param.buffer.rpartition(".")[0] in homes


@pytest.mark.parametrize("stage", [1, 2])
def test_new_parameters_are_gathered_in_the_backward_too(stage: int) -> None:
    program = _overlapped(stage)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    steps = {op.param.buffer: i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep)}
    gathers = {
        op.pairs[0].destination.buffer: i
        for i, op in enumerate(body)
        if isinstance(op, ops.AllGather)
    }
    assert steps.keys() == gathers.keys()
    for name, gather in gathers.items():
        assert masks[gather] >> steps[name] & 1
        later = [step for step in steps.values() if step > steps[name]]
        assert not any(masks[gather] >> step & 1 or masks[step] >> gather & 1 for step in later)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_only_the_loss_is_left_of_the_update(micro_steps: int) -> None:
    program = _overlapped(3, micro_steps=micro_steps)
    left = program.section_by_name[UPDATE].body
    assert [type(op) for op in left if not isinstance(op, ops.Wait)] == [
        *([ops.Cast] if micro_steps > 1 else []),
        ops.AllReduce,
        *([ops.Fill, ops.Fill] if micro_steps > 1 else []),
    ]
    if micro_steps > 1:
        before = applied(mlp(micro_steps=3, optimizer="momentum"), for_stage(3, 3))
        assert program.section_by_name[MICRO_STEP] == before.section_by_name[MICRO_STEP]


@pytest.mark.parametrize("bucket", [0, 10_000])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_weights_of_batches_are_summed_at_the_beginning(bucket: int, micro_steps: int) -> None:
    """They are known before the first segment is called; one launch would hold them back until the loss is known."""
    logical = mlp(is_weighted=True, micro_steps=micro_steps)
    passes = for_stage(3, 3, overlap_update=True, bucket=bucket)
    program = proved(logical, passes)
    body = program.section_by_name[LAST_MICRO_STEP].body
    kinds = [type(op) for op in body]
    summed = next(
        i
        for i, op in enumerate(body)
        if isinstance(op, ops.AllReduce) and op.pairs[0].destination.buffer == "weight"
    )
    assert summed < kinds.index(ops.Decide) < kinds.index(ops.Compute)
    left = program.section_by_name[UPDATE].body
    assert not any(isinstance(op, ops.OptimizerStep | ops.Decide) for op in left)


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 1.0), ("fp16", None), ("fp16", 1.0)])
def test_a_global_decision_comes_before_any_step(precision: str, clip: float | None) -> None:
    program = applied(mlp(precision=precision, clip=clip), for_stage(2, 3))
    assert OverlapUpdate()(program) == program
    options = make_options(
        {"stage": 2, "world_size": 3, "precision": precision, **({"clip": clip} if clip else {})}
    )
    assert OverlapUpdate() not in for_options(options)


def test_a_user_may_have_the_update_apart() -> None:
    options = {"stage": 2, "world_size": 3}
    assert for_options(make_options(options))[-3] == OverlapUpdate()
    apart = make_options({**options, "overlap_update": False})
    assert OverlapUpdate() not in for_options(apart)


# -------------------------------------------------------------------------------------------------------- mutants


def _edited(program: Program, name: str, body: tuple[Op, ...]) -> Program:
    return derive_waits(with_body(program, name, body))


def _moved(program: Program, kind: type, before: type) -> Program:
    """The first op of a kind in the last micro-step put before the first of another kind."""
    body = list(without_waits(program).section_by_name[LAST_MICRO_STEP].body)
    op = next(op for op in body if isinstance(op, kind))
    body.remove(op)
    at = next(i for i, other in enumerate(body) if isinstance(other, before))
    return _edited(program, LAST_MICRO_STEP, (*body[:at], op, *body[at:]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_before_the_decision_is_rejected(stage: int) -> None:
    program = _overlapped(stage)
    assert verify(program).is_valid
    body = without_waits(program).section_by_name[LAST_MICRO_STEP].body
    assert isinstance(body[0], ops.Decide)
    mutant = _edited(program, LAST_MICRO_STEP, (*body[1:], body[0]))
    assert "Z405" in codes(mutant)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_on_an_unreduced_gradient_is_rejected(stage: int) -> None:
    reduction = ops.AllReduce if stage == 0 else ops.ReduceScatter
    assert codes(_moved(_overlapped(stage), ops.OptimizerStep, reduction)) & {"Z402", "Z404"}


def test_a_use_of_the_parameters_after_their_step_is_rejected() -> None:
    """Stage 0 updates in place what the section computes with."""
    program = _overlapped(0)
    body = without_waits(program).section_by_name[LAST_MICRO_STEP].body
    forward = next(op for op in body if isinstance(op, ops.Compute))
    (output,) = (d.view.region.buffer for d in forward.destinations if d is not None)
    begin, end = (kind(buffer=output, stream=forward.stream) for kind in (ops.Alloc, ops.Release))
    again: tuple[Op, ...] = (begin, forward, end)
    assert codes(_edited(program, LAST_MICRO_STEP, (*body, *again))) == {"Z401"}


def test_a_second_step_or_decision_is_rejected() -> None:
    program = _overlapped(2)
    before = applied(mlp(optimizer="momentum"), for_stage(2, 3))
    update = without_waits(program).section_by_name[UPDATE].body
    again = before.section_by_name[UPDATE].body
    decide = next(op for op in again if isinstance(op, ops.Decide))
    step = next(op for op in again if isinstance(op, ops.OptimizerStep))
    assert "Z405" in codes(_edited(program, UPDATE, (*update, decide)))
    assert "Z403" in codes(_edited(program, UPDATE, (*update, step)))


@pytest.mark.parametrize("kind", [ops.Decide, ops.OptimizerStep, ops.AllGather])
def test_what_the_boundary_says_must_have_happened(kind: type) -> None:
    """Without the op, on both sides of the boundary what is said to be new is old."""
    program = _overlapped(1)
    body = list(without_waits(program).section_by_name[LAST_MICRO_STEP].body)
    body.remove(next(op for op in body if isinstance(op, kind)))
    assert not verify(_edited(program, LAST_MICRO_STEP, tuple(body))).is_valid


def test_a_boundary_must_say_what_is_new() -> None:
    program = _overlapped(3)
    (last, update) = program.sections
    for holding in last.exit.holdings:
        kept = State(holdings=tuple(h for h in last.exit.holdings if h != holding))
        sections = (replace(last, exit=kept), replace(update, entry=kept))
        broken = codes(replace(program, sections=sections))
        assert broken & {"Z403", "Z405"}, holding.region.buffer


@pytest.mark.parametrize("stage", [0, 2])
def test_an_early_step_of_a_clipped_program_is_rejected(stage: int) -> None:
    """The norm, the decision and a step, all moved to where the step's own gradient is reduced."""
    logical = mlp(clip=1.0, optimizer="momentum")
    program = without_waits(applied(logical, for_stage(stage, 3)))
    last, update = (program.section_by_name[name].body for name in (LAST_MICRO_STEP, UPDATE))
    kinds = (ops.GradNorm, ops.AllReduce, ops.Decide)
    early = [op for op in update if isinstance(op, kinds)]
    steps = [op for op in update if isinstance(op, ops.OptimizerStep)]
    moved = [replace(op, event=None) for op in (*early, *steps)]
    first = next(
        i + 1 for i, op in enumerate(last) if isinstance(op, ops.AllReduce | ops.ReduceScatter)
    )
    mutant = _edited(program, LAST_MICRO_STEP, (*last[:first], *moved, *last[first:]))
    mutant = _edited(mutant, UPDATE, tuple(o for o in update if o not in (*early, *steps)))
    assert "Z405" in codes(mutant)


def test_the_stream_is_declared_and_carries_the_update() -> None:
    program = _overlapped(2)
    assert program.streams[-1] == BESIDE
    found = {op.stream for op in program.ops() if isinstance(op, ops.OptimizerStep | ops.Decide)}
    assert found == {BESIDE.name}
    assert BESIDE not in LOGICAL.streams
