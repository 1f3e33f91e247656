"""What each stage sends, when it reduces, and what it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.text import parse, print_program


def _lower(program: Program, stage: int, world_size: int, *, elide: bool = True) -> Program:
    return applied(program, for_stage(stage, world_size, elide=elide))


def _psi_bytes(program: Program) -> int:
    return sum(flat.padded_numel * flat.dtype.itemsize_bytes for flat in program.flats)


@examples(25)
@given(cases())
def test_bytes_on_the_wire(case: Case) -> None:
    program = case.scheduled()
    psi = _psi_bytes(program)
    sent = collective_bytes(program)
    gathered = sent["all_gather"]
    if case.stage == 0:  # An all-reduce is a reduce-scatter and an all-gather.
        sums = 2 if case.micro_steps > 1 and case.precision != "fp32" else 1
        wide = sum(flat.padded_numel * 4 for flat in program.flats)
        assert sent["all_reduce"] == (wide if sums == 2 else psi)
        assert gathered == sent["reduce_scatter"] == 0
    elif case.stage < 3:
        assert gathered == psi
        assert sent["all_reduce"] == 0
    elif case.elide:
        assert gathered <= 2 * psi
    else:
        assert gathered == 2 * psi
    if case.stage == 2 or (case.stage > 0 and case.micro_steps == 1):
        assert sent["reduce_scatter"] == psi


@examples(25)
@given(cases())
def test_every_stage_prints_and_parses(case: Case) -> None:
    program = case.scheduled()
    assert parse(print_program(program)) == program


@examples(25)
@given(cases())
def test_a_gradient_is_reduced_as_soon_as_it_is_complete(case: Case) -> None:
    """No compute op that does not contribute to it must finish before its reduction may begin."""
    program = case.scheduled()
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    for index, op in enumerate(body):
        if not isinstance(op, ops.AllReduce | ops.ReduceScatter):
            continue
        flats = {_home(program, pair.source.buffer) for pair in op.pairs}
        last = max(
            i
            for i, other in enumerate(body)
            if isinstance(other, ops.Compute)
            and any(
                d is not None
                and d.gradient is not None
                and program.parameter_by_name[d.gradient][0].name in flats
                for d in other.destinations
            )
        )
        later = [i for i in range(last + 1, index) if isinstance(body[i], ops.Compute)]
        assert masks[index] >> last & 1
        assert later == []


def _home(program: Program, buffer: str) -> str:
    """The longest flat name that begins the buffer's name."""
    return max((f.name for f in program.flats if buffer.startswith(f"{f.name}.")), key=len)


def test_a_tied_weight_is_reduced_after_its_last_contributor() -> None:
    program = _lower(mlp(tied=True), 2, 4)
    body = program.section_by_name[LAST_MICRO_STEP].body
    reductions = [op.pairs[0].source.buffer for op in body if isinstance(op, ops.ReduceScatter)]
    assert reductions == [
        "blocks.2.grad_full",
        "blocks.1.grad_full",
        "blocks.0.grad_full",
        "root.pre.grad_full",
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_decision_is_taken_on_global_scalars(stage: int) -> None:
    program = _lower(mlp(precision="fp16", clip=1.0), stage, 4)
    body = program.section_by_name[UPDATE].body
    (decide,) = (i for i, op in enumerate(body) if isinstance(op, ops.Decide))
    (reduce,) = (i for i, op in enumerate(body) if isinstance(op, ops.AllReduce))
    collective = body[reduce]
    assert isinstance(collective, ops.AllReduce)
    names = [pair.destination.buffer for pair in collective.pairs]
    assert names == ["overflow", "norm", "loss"]
    assert happens.before(body)[decide] >> reduce & 1
    for op in body:
        if isinstance(op, ops.GradNorm | ops.CheckFinite):
            own = [source.local_numel(program.mesh) for source in op.sources]
            assert own == [flat.padded_numel // 4 for flat in program.flats]


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_gathered_while_the_next_flat_is_updated(stage: int) -> None:
    program = _lower(mlp(), stage, 4)
    body = program.section_by_name[UPDATE].body
    masks = happens.before(body)
    gathers = [i for i, op in enumerate(body) if isinstance(op, ops.AllGather)]
    updates = [i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep)]
    assert len(gathers) == len(updates) == len(program.flats)
    for gather, update, following in zip(gathers, updates, updates[1:], strict=False):
        assert masks[gather] >> update & 1
        assert not masks[gather] >> following & 1
        assert not masks[following] >> gather & 1


def test_gathers_that_nobody_reads_are_elided() -> None:
    """Of five units' forward and backward, the first one's backward reads nothing and the last one stays gathered."""
    program = _lower(mlp(blocks=3), 3, 4)
    body = program.section_by_name[LAST_MICRO_STEP].body
    found = [life.buffer for life in happens.lives(body, program)]
    assert found == [
        "root.pre.full",
        "blocks.0.full",
        "blocks.1.full",
        "blocks.2.full",
        "root.post.full",
        "blocks.2.full",
        "blocks.1.full",
        "blocks.0.full",
    ]


def test_without_elision_everything_is_gathered_twice() -> None:
    program = _lower(mlp(blocks=3), 3, 4, elide=False)
    body = program.section_by_name[LAST_MICRO_STEP].body
    found = [life.buffer for life in happens.lives(body, program)]
    units = ["root.pre", "blocks.0", "blocks.1", "blocks.2", "root.post"]
    assert found == [f"{unit}.full" for unit in (*units, *reversed(units))]


@examples(25)
@given(cases(stages=(3,)))
def test_a_gathered_buffer_is_released_after_its_last_reader(case: Case) -> None:
    program = case.scheduled()
    for section in program.sections:
        for life in happens.lives(section.body, program):
            after = max((life.gather, *life.readers))
            between = section.body[after + 1 : life.release]
            assert all(isinstance(op, ops.Release | ops.Wait) for op in between)


@examples(25)
@given(cases(stages=(2, 3)))
def test_no_full_gradient_outlives_its_reduction(case: Case) -> None:
    program = case.scheduled()
    assert not any(
        buffer.role is Role.GRAD and buffer.is_persistent and buffer.numel == flat.padded_numel
        for flat in program.flats
        for buffer in program.buffers
        if case.world_size > 1 and buffer.name.startswith(flat.name)
    )
    for section in program.sections:
        for index, op in enumerate(section.body):
            if isinstance(op, ops.ReduceScatter):
                after = section.body[index + 1]
                assert isinstance(after, ops.Release)
                assert after.buffer == op.pairs[0].source.buffer
