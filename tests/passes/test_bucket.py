"""Merged collectives move the same bytes in fewer launches, to the same result, within the bounds on memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes import manager
from zeroir.passes.communication.bound_gradients import BoundGradients
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import for_options
from zeroir.verify import PROVED, verify

SIZES = st.integers(1, 40_000)
"""Up to ten flats of the small programs, each of 1,024 elements a rank."""


def _lower(program: Program, stage: int, bucket: int) -> Program:
    return applied(program, for_stage(stage, 4, bucket=bucket))


def _launches(body: Sequence[Op]) -> int:
    return sum(isinstance(op, ops.Collective) for op in body)


def _bytes(program: Program, buffer: str) -> int:
    return program.buffer_by_name[buffer].size_bytes


# -------------------------------------------------------------------------------------------------------- numbers


@examples(4)
@given(cases(world_sizes=(1, 3)), SIZES, st.integers(0, 2**16))
def test_it_computes_the_same(case: Case, size: int, schedule_seed: int) -> None:
    program = proved(case.logical(), replace(case, bucket=size).passes())
    assert_same(program, case.scheduled(), case.micro_steps, [schedule_seed])


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3))]
)
def test_with_the_update_in_the_backward_it_computes_the_same(stage: int) -> None:
    logical = mlp(blocks=3, keep_fp32=True, precision="bf16", optimizer="momentum")
    passes = for_stage(stage, 3, bucket=9_000, overlap_update=True)
    assert passes[-1] == OverlapUpdate()
    assert_same(proved(logical, passes), applied(logical, for_stage(stage, 3)), seeds=[11])


# ------------------------------------------------------------------------------------------------- bytes, launches


@examples(8)
@given(cases(), st.lists(SIZES, min_size=2, max_size=2).map(sorted))
def test_more_bytes_make_fewer_launches_of_the_same_bytes(case: Case, sizes: list[int]) -> None:
    programs = [replace(case, bucket=size).scheduled() for size in (0, *sizes)]
    for smaller, larger in pairwise(programs):
        assert collective_bytes(larger) == collective_bytes(smaller)
        for before, after in zip(smaller.sections, larger.sections, strict=True):
            assert _launches(after.body) <= _launches(before.body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_that_may_be_together_is_in_the_end(stage: int) -> None:
    """A step's forward and backward, and in stages 1 and 2 its update, each gather or reduce once."""
    program = _lower(mlp(blocks=3), stage, 10**9)
    last, update = (program.section_by_name[name].body for name in (LAST_MICRO_STEP, UPDATE))
    reduced = [op for op in last if isinstance(op, ops.AllReduce | ops.ReduceScatter)]
    assert [len(op.pairs) for op in reduced] == [5]
    gathered = [op for op in update if isinstance(op, ops.AllGather)]
    assert [len(op.pairs) for op in gathered] == ([5] if stage in (1, 2) else [])
    ahead = [op for op in last if isinstance(op, ops.AllGather | ops.Prefetch)]
    # The blocks' forward and the head; then the blocks again, the last of which has just been released.
    assert [len(op.pairs) for op in ahead] == ([5, 3] if stage == 3 else [])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_larger_stays_alone(stage: int) -> None:
    """Two neighbours are one byte too many."""
    logical = mlp(blocks=3)
    alone = _lower(logical, stage, 0)
    two = 2 * 4 * alone.flats[0].padded_numel
    assert replace(_lower(logical, stage, two - 1), passes=()) == replace(alone, passes=())
    assert _lower(logical, stage, two) != alone


def test_flats_of_one_unit_travel_together_whatever_their_dtype() -> None:
    program = _lower(mlp(blocks=2, precision="bf16", keep_fp32=True), 3, 6_144)
    buffers = program.buffer_by_name
    dtypes = [
        {buffers[pair.source.buffer].dtype for pair in op.pairs}
        for op in program.section_by_name[LAST_MICRO_STEP].body
        if isinstance(op, ops.Collective)
    ]
    assert any(len(found) == 2 for found in dtypes)


# --------------------------------------------------------------------------------------------------------- memory


def _largest_group(program: Program) -> int:
    """The most bytes that one compute op is the first to read."""
    found: dict[int, int] = {}
    body = program.section_by_name[LAST_MICRO_STEP].body
    for life in happens.lives(body, program):
        for first in life.readers[:1]:
            found[first] = found.get(first, 0) + _bytes(program, life.buffer)
    return max(found.values())


@examples(8)
@given(cases(stages=(3,)).filter(lambda case: case.elide or not case.tied), SIZES)
def test_gathered_parameters_stay_within_the_bound(case: Case, size: int) -> None:
    """On no interleaving more than distance + 1 buckets, each of at most a unit and ``size`` bytes.

    What is gathered without being read is beside them, as it is without buckets.
    """
    bucket = _largest_group(case.scheduled()) + size
    program = replace(case, bucket=size).scheduled()
    for section in program.sections:
        masks = happens.before(section.body)
        lives = [life for life in happens.lives(section.body, program) if life.readers]
        for number, life in enumerate(lives):
            live = [e for e in lives[:number] if not masks[life.alloc] >> e.release & 1]
            total = sum(_bytes(program, one.buffer) for one in (*live, life))
            assert total <= (case.distance + 1) * bucket


@examples(8)
@given(cases(stages=(2, 3)), SIZES)
def test_full_gradients_stay_within_the_bound(case: Case, size: int) -> None:
    """Beside those that are kept across other units by choice, on no interleaving more than ``live`` buckets."""
    program = replace(case, bucket=size).scheduled()
    for section in program.sections:
        body = section.body
        masks = happens.before(body)
        launches = {
            pair.source.buffer: index
            for index, op in enumerate(body)
            if isinstance(op, ops.ReduceScatter)
            for pair in op.pairs
            if not program.buffer_by_name[pair.source.buffer].is_persistent
        }
        releases = {
            op.buffer: i
            for i, op in enumerate(body)
            if isinstance(op, ops.Release) and op.buffer in launches
        }
        unit = sum(sorted(_bytes(program, name) for name in launches)[-2:])
        begun: list[str] = []
        for index, op in enumerate(body):
            if not (isinstance(op, ops.Alloc) and op.buffer in launches):
                continue
            live = [
                name
                for name in begun
                if launches[name] == launches[op.buffer]
                or (releases[name] < index and not masks[index] >> releases[name] & 1)
            ]
            begun.append(op.buffer)
            total = sum(_bytes(program, name) for name in (*live, op.buffer))
            assert total <= case.live * (unit + size)


@examples(8)
@given(cases(), SIZES)
def test_what_must_be_ordered_is(case: Case, size: int) -> None:
    program = replace(case, bucket=size).scheduled()
    for section in program.sections:
        assert happens.unordered(section.body, program) == []


@pytest.mark.parametrize("size", [7_000, 13_000, 10**6])
def test_no_bucket_is_gathered_while_nothing_is_computed(size: int) -> None:
    """But the first, every gather may begin before the computation ahead of its use has ended."""
    program = _lower(mlp(blocks=8), 3, size)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    computes = [i for i, op in enumerate(body) if isinstance(op, ops.Compute)]
    firsts: dict[int, int] = {}
    for life in happens.lives(body, program):
        firsts[life.gather] = min(life.readers[0], firsts.get(life.gather, len(body)))
    for gather, first in sorted(firsts.items())[1:]:
        ahead = computes[computes.index(first) - 1]
        assert not masks[gather] >> ahead & 1


# -------------------------------------------------------------------------------------------------------- contract


def test_it_comes_before_gathers_are_issued_ahead() -> None:
    program = applied(mlp(), for_stage(3, 2))
    with pytest.raises(UserError, match=r"`prefetch\{distance=1\}` has ended; put `bucket`"):
        manager.run(program, [Bucket(bytes=9)])


def test_before_or_after_the_bound_on_gradients_makes_no_difference() -> None:
    """A bucket is one unit to the bound either way, and the waits follow from both."""
    logical = mlp(blocks=3)
    sharded, bucket, bound = for_stage(2, 3)[:-1], Bucket(bytes=1 << 20), BoundGradients(live=1)
    after = applied(logical, (*sharded, bound, bucket))
    before = applied(logical, (*sharded, bucket, bound))
    assert replace(after, passes=()) == replace(before, passes=())
    assert verify(after, reference=logical).laws["Z302"] == PROVED


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UserError, match="a number of bytes, at least 0, not -1"):
        Bucket(bytes=-1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_option_is_the_pass(stage: int) -> None:
    def merging(bucket: int) -> list[object]:
        options = make_options({"stage": stage, "world_size": 2, "bucket": bucket})
        return [step for step in for_options(options) if isinstance(step, Bucket)]

    assert merging(0) == []
    assert merging(4096) == [Bucket(bytes=4096)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathers_have_a_limit_of_their_own(stage: int) -> None:
    """One limit of 0 and one without bound: only the other kind of collective is merged."""
    logical = mlp(blocks=4)

    def launches(bucket: int, gathers: int | None) -> tuple[int, int]:
        passes = for_stage(stage, 2, bucket=bucket, bucket_gathers=gathers)
        ops_of = list(applied(logical, passes).ops())
        gathered = sum(isinstance(op, ops.Gather) for op in ops_of)
        reduced = sum(isinstance(op, ops.ReduceScatter | ops.AllReduce) for op in ops_of)
        return gathered, reduced

    apart, together = launches(0, None), launches(10**9, None)
    assert launches(10**9, 0) == (apart[0], together[1])
    assert launches(0, 10**9) == (together[0], apart[1])
    assert apart > together
