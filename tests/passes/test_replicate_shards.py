"""Hybrid sharding: groups of ranks hold the same shards, and the gradients of a step cross between them once."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.example_programs import LOGICAL
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.support.edits import is_of, mapped, without_each, without_ops
from tests.support.examples import examples
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program
from zeroir.ir.text import parse, print_program
from zeroir.passes import manager
from zeroir.passes.common.order import derive_waits
from zeroir.passes.stages.replicate_shards import ReplicateShards
from zeroir.verify import verify

STAGES = range(4)


def hybrid(logical: Program, stage: int, replicas: int, shards: int) -> Program:
    """The program, not verified after every pass: that is one test's affair."""
    return applied(logical, for_stage(stage, replicas * shards, replicas=replicas))


@pytest.mark.slow
@examples(8)
@given(cases(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_whatever_the_passes_made_stays_proved(
    case: Case, replicas: int, shards: int, overlap_update: bool
) -> None:
    logical = case.logical()
    passes = for_stage(
        case.stage,
        replicas * shards,
        replicas=replicas,
        elide=case.elide,
        bucket=case.bucket,
        distance=case.distance,
        live=case.live,
        overlap_update=overlap_update,
    )
    program = manager.run(logical, passes)
    assert program.mesh.world_size == replicas * shards
    assert verify(program, logical).findings == ()
    text = print_program(program)
    assert parse(text) == program
    assert "dp" not in text.replace("all-reduce-gradients{dp=", "")


@pytest.mark.parametrize(
    ("replicas", "shards", "precision", "clip"),
    [
        *((2, 3, *what) for what in (("fp32", None), ("fp32", 0.5), ("bf16", None), ("fp16", 0.5))),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2, "bf16", None), (2, 2, "fp16", 0.5), (3, 2, "fp32", 0.5))
        ),
    ],
)
def test_every_stage_computes_the_same_bits(
    replicas: int, shards: int, precision: str, clip: float | None
) -> None:
    logical = mlp(blocks=1, precision=precision, clip=clip)
    plain = hybrid(logical, 0, replicas, shards)
    for stage in STAGES[1:]:
        assert_same(hybrid(logical, stage, replicas, shards), plain, seeds=[stage])


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_micro_steps_add_over_ranks_or_micro_steps_first(precision: str) -> None:
    logical = mlp(blocks=1, precision=precision, clip=0.5, micro_steps=3)
    for stage in (1, 3):
        program, below = (hybrid(logical, number, 2, 3) for number in (stage, stage - 1))
        assert_same(program, below, 3, [stage])


@pytest.mark.parametrize("stage", STAGES)
def test_one_group_is_plain_data_parallelism(stage: int) -> None:
    logical = mlp(blocks=1, precision="bf16", clip=0.5)
    plain = print_program(applied(logical, for_stage(stage, 3)))
    one = print_program(hybrid(logical, stage, 1, 3))
    for old, new in (
        ("pass replicate-shards{replicas=1}\n", ""),
        ("mesh replicate=1 shard=3\n", "mesh dp=3\n"),
        ("axis=shard\n", "axis=dp\n"),
        ("@shard", "@dp"),
        ("reduced=(shard)", "reduced=(dp)"),
    ):
        one = one.replace(old, new)
    # Columns of the text are as wide as what stands in them.
    assert [line.split() for line in one.split("\n")] == [
        line.split() for line in plain.split("\n")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_one_rank_are_plain_replicas(stage: int) -> None:
    # Without clipping: norms are added up by shards there, and by whole gradients here.
    logical = mlp(blocks=1, precision="fp16")
    plain = applied(logical, for_stage(0, 3))
    assert_same(hybrid(logical, stage, 3, 1), plain, seeds=[stage])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_only_shards_cross_and_only_once_a_step(stage: int, micro_steps: int) -> None:
    logical = mlp(blocks=1, precision="bf16", micro_steps=micro_steps)
    program = hybrid(logical, stage, 2, 4)
    over = {axis.name: collective_bytes(program, axis=axis.name) for axis in program.mesh.axes}
    kept_bytes = (DType.F32 if micro_steps > 1 else DType.BF16).itemsize_bytes
    numel = sum(flat.padded_numel for flat in program.flats)
    assert over["replicate"]["all_reduce"] == numel // 4 * kept_bytes
    assert over["replicate"]["all_gather"] == over["replicate"]["reduce_scatter"] == 0
    assert over["shard"]["all_reduce"] == 0
    total = collective_bytes(program)
    assert {key: sum(own[key] for own in over.values()) for key in total} == total
    if micro_steps > 1:
        section = program.section_by_name[MICRO_STEP]
        assert not any(isinstance(op, ops.AllReduce) for op in section.body)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_what_is_reduced_in_one_launch_crosses_in_one(micro_steps: int) -> None:
    logical = mlp(blocks=3, precision="bf16", micro_steps=micro_steps)
    program = applied(logical, for_stage(2, 6, replicas=2, bucket=4 * 768 * 2))
    body = program.section_by_name[LAST_MICRO_STEP].body
    within = [len(op.pairs) for op in body if isinstance(op, ops.ReduceScatter)]
    assert max(within) > 1
    assert [len(op.pairs) for op in body if is_across(op)] == within
    assert verify(program, logical).findings == ()


@pytest.mark.parametrize(
    "stage", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))]
)
def test_an_update_in_the_backward_changes_no_bit(stage: int) -> None:
    logical = mlp(blocks=1, precision="bf16")
    program = proved(logical, for_stage(stage, 6, replicas=2, overlap_update=True))
    last = program.section_by_name[LAST_MICRO_STEP].body
    assert any(isinstance(op, ops.OptimizerStep) for op in last)
    assert_same(program, hybrid(logical, stage, 2, 3), seeds=range(2))


def test_shards_are_cut_for_a_group_and_not_for_all_ranks() -> None:
    logical = mlp()
    plain, program = applied(logical, for_stage(3, 4)), hybrid(logical, 3, 2, 4)
    own = {b.name: b.numel for b in plain.buffers}
    assert {b.name: b.numel for b in program.buffers} == own


# --------------------------------------------------------------------------------------------------------- mutants


def is_across(op: Op) -> TypeGuard[ops.AllReduce]:
    return isinstance(op, ops.AllReduce) and op.comm == "across"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_sums_that_do_not_cross_are_noticed(stage: int, micro_steps: int) -> None:
    logical = mlp(blocks=1, micro_steps=micro_steps)
    broken = without_ops(hybrid(logical, stage, 2, 2), is_across, LAST_MICRO_STEP)
    assert codes(broken, logical) == {"Z404"}


@pytest.mark.parametrize("stage", STAGES)
def test_sums_that_cross_twice_are_noticed(stage: int) -> None:
    def twice(op: Op) -> tuple[Op, ...]:
        return (op, replace(op, event=None)) if is_across(op) else (op,)

    logical = mlp(blocks=1)
    again = mapped(hybrid(logical, stage, 2, 2), twice, LAST_MICRO_STEP)
    assert codes(again, logical) == {"Z402"}


def test_gathers_among_ranks_that_hold_the_same_are_noticed() -> None:
    def astray(op: Op) -> tuple[Op, ...]:
        if isinstance(op, ops.AllGather | ops.Prefetch):
            return (replace(op, comm="across"),)
        return (op,)

    # In order again, so that all that is wrong is who gathers.
    broken = derive_waits(mapped(hybrid(LOGICAL, 3, 2, 2), astray, LAST_MICRO_STEP))
    assert codes(broken, LOGICAL) == {"Z401"}


@pytest.mark.parametrize(("scalar", "code"), [("norm", "Z405"), ("loss", "Z408")])
def test_scalars_are_combined_over_the_axes_that_they_differ_along(scalar: str, code: str) -> None:
    """The norm is the same in all groups and must not be added up; the loss is each rank's own and must be."""
    logical = mlp(blocks=1, precision="fp16", clip=0.5)
    region = Region(buffer=scalar, offset=0, numel=1)
    own = ops.Pair(source=region, destination=region)

    def toggled(op: Op) -> tuple[Op, ...]:
        if not is_across(op):
            return (op,)
        rest = tuple(pair for pair in op.pairs if pair != own)
        return (replace(op, pairs=rest if rest != op.pairs else (*op.pairs, own)),)

    program = hybrid(logical, 2, 2, 2)
    assert codes(program, logical) == set()
    assert codes(derive_waits(mapped(program, toggled, UPDATE)), logical) == {code}


@pytest.mark.parametrize("stage", [0, 3])
def test_no_wait_can_be_left_out(stage: int) -> None:
    for where, mutant in without_each(hybrid(LOGICAL, stage, 2, 2), is_of(ops.Wait)):
        assert codes(mutant, LOGICAL), where


def test_communicators_of_two_axes_are_kept_in_order() -> None:
    """Without the waits that only they need, ranks could start a gather and a sum across in different orders."""
    mutants = without_each(hybrid(LOGICAL, 3, 2, 2), is_of(ops.Wait))
    assert any("Z202" in codes(mutant, LOGICAL) for _, mutant in mutants)


def test_groups_are_equal_and_at_least_one() -> None:
    with pytest.raises(UserError, match="`replicas` of `replicate-shards` is a number of groups"):
        ReplicateShards(replicas=0)
    program = hybrid(LOGICAL, 1, 2, 2)
    with pytest.raises(UserError, match=r"`replicate-shards\{replicas=2\}` has ended"):
        manager.run(program, [ReplicateShards(replicas=2)])
