"""Gradients that rest on the host: the same bits, less device memory, and no waiting for a copy that can be avoided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.passes.test_offload_optimizer import POSSIBLE
from tests.passes.variants import called_twice, frozen
from tests.support.covering import covering
from tests.support.edits import at, is_of, places, put, without_each
from tests.support.examples import examples
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.mesh import COMPUTE, COPY_OUT, OPTIMIZER
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.footprint import footprint
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.update_streams import UPDATE_IN, UPDATE_OUT
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.verify import verify

ALONE: tuple[Pass, ...] = (OffloadGradients(),)
WITH_OPTIMIZER: tuple[Pass, ...] = (OffloadOptimizer(), OffloadGradients())
WITH_HALF: tuple[Pass, ...] = (OffloadOptimizer(fraction=0.5), OffloadGradients())
WAYS = {"alone": ALONE, "with-optimizer": WITH_OPTIMIZER, "with-half": WITH_HALF}
CASES = covering([(*training, way) for training in POSSIBLE for way in WAYS], tuple)


DOWN = (COPY_OUT, UPDATE_OUT)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "micro_steps", "clip", "overlap_update", "replicas", "way"), CASES
)
def test_it_computes_the_same(
    stage: int,
    precision: str,
    micro_steps: int,
    clip: float | None,
    overlap_update: bool,
    replicas: int | None,
    way: str,
) -> None:
    ranks = 4 if replicas else 3
    logical = mlp(
        precision=precision, micro_steps=micro_steps, clip=clip, keep_fp32=precision != "fp32"
    )
    passes = for_stage(stage, ranks, overlap_update=overlap_update, replicas=replicas)
    before = applied(logical, passes)
    after = manager.run(before, [*WAYS[way], SaveState(), PlanMemory()], reference=logical)
    assert_same(after, before, micro_steps, (0, 1))


@pytest.mark.slow
@examples(4)
@given(cases(world_sizes=(1, 4)), st.sampled_from(sorted(WAYS)), st.integers(0, 2**16))
def test_any_program_computes_the_same(case: Case, way: str, schedule_seed: int) -> None:
    before = applied(case.logical(), case.passes())
    after = manager.run(before, WAYS[way], reference=case.logical())
    assert_same(after, before, case.micro_steps, [schedule_seed])


@pytest.mark.parametrize("make", [frozen, called_twice])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_parameters_and_units_called_twice_train_as_before(
    make: Callable[[], Program], stage: int
) -> None:
    passes = for_stage(stage, 3)
    program = proved(make(), (*passes, *WITH_OPTIMIZER))
    assert_same(program, applied(make(), passes), seeds=[3])


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_one_launch_reduces_go_down_together(stage: int) -> None:
    logical = mlp(precision="bf16", clip=1.0)
    passes = for_stage(stage, 3, bucket=9_000)
    before = applied(logical, passes)
    launches = [op for op in before.ops() if isinstance(op, ops.ReduceScatter)]
    assert any(len(op.pairs) > 1 for op in launches)
    assert_same(proved(logical, (*passes, *WITH_OPTIMIZER)), before, seeds=[3])


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("way", ["alone", "with-optimizer"])
def test_no_gradient_rests_on_the_device(stage: int, micro_steps: int, way: str) -> None:
    logical = mlp(precision="bf16", micro_steps=micro_steps)
    before = applied(logical, for_stage(stage, 4))
    after = proved(logical, (*for_stage(stage, 4), *WAYS[way]))
    gradients = {b.name: b for b in before.buffers if b.is_persistent and b.role is Role.GRAD}
    assert gradients
    for name, buffer in gradients.items():
        home = after.buffer_by_name[name]
        assert home.space is Space.HOST
        # Where each rank uses its slice alone, the host has no more.
        is_sliced = stage == 1 and micro_steps == 1
        assert home.numel == buffer.numel // (4 if is_sliced else 1)
    resting = footprint(after).resting_bytes
    others = [b for b in before.buffers if b.is_persistent and b.name not in gradients]
    states = [b for b in others if b.role in (Role.MASTER, Role.STATE)]
    moved = states if way == "with-optimizer" else []
    on_device = [b for b in others if b.space is Space.DEVICE and b not in moved]
    assert resting == sum(b.size_bytes for b in on_device)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_device_memory_on_the_way_does_not_grow_with_the_model(stage: int) -> None:
    """Two blocks' gradients are live at most, and those at both ends of the model."""
    grown = []
    for blocks in (4, 8):
        program = applied(mlp(blocks=blocks), (*for_stage(stage, 2), *WITH_OPTIMIZER))
        names = {b.name for b in program.buffers if b.role is Role.GRAD and not b.is_persistent}
        only = replace(
            program,
            buffers=tuple(
                b if b.name in names or b.is_persistent else replace(b, space=Space.HOST)
                for b in program.buffers
            ),
        )
        grown.append(footprint(only).arena_bytes)
    assert grown[0] == grown[1] > 0


# --------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_go_down_during_the_backward(stage: int, micro_steps: int) -> None:
    program = applied(
        mlp(clip=1.0, micro_steps=micro_steps), (*for_stage(stage, 3), *WITH_OPTIMIZER)
    )
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    computes = [i for i, op in enumerate(body) if isinstance(op, ops.Compute)]
    down = [i for i, op in enumerate(body) if isinstance(op, ops.ToHost) and op.stream in DOWN]
    assert len(down) >= len(program.flats)
    assert not masks[down[0]] >> computes[-1] & 1, "the first needs no later backward"
    # Of a computation's predecessors only the copies are that the bound on full gradients names.
    before_last = [i for i in down if masks[computes[-1]] >> i & 1]
    assert len(before_last) < len([i for i in down if i < computes[-1]])
    update = program.section_by_name[UPDATE].body
    assert not any(isinstance(op, ops.ToHost) and op.stream in DOWN for op in update)


def test_sums_are_added_up_on_the_host() -> None:
    program = applied(mlp(precision="bf16", micro_steps=2), (*for_stage(3, 3), *WITH_OPTIMIZER))
    sums = [
        op
        for op in program.ops()
        if isinstance(op, ops.Cast) and op.mode is Mode.ACCUMULATE and "grad" in op.source.buffer
    ]
    assert len(sums) == 2 * len(program.flats)
    assert {op.stream for op in sums} == {OPTIMIZER}
    fills = [
        op for op in program.ops() if isinstance(op, ops.Fill) and "sum" in op.destination.buffer
    ]
    assert {op.stream for op in fills} == {OPTIMIZER, COMPUTE}, "that of the weights is a scalar"


def test_waits_are_derived_from_effects_alone() -> None:
    for passes in WAYS.values():
        program = applied(mlp(micro_steps=2, clip=1.0), (*for_stage(2, 3), *passes))
        assert derive_waits(without_waits(program)) == program
        for section in program.sections:
            assert happens.unordered(section.body, program) == []


# ---------------------------------------------------------------------------------------------------------- choice


def test_gradients_follow_the_optimizer_unless_units_are_named() -> None:
    def at_home(program: Program) -> set[str]:
        return {
            b.name.removesuffix(".grad")
            for b in program.buffers
            if b.is_persistent and b.role is Role.GRAD and b.space is Space.HOST
        }

    half = (*for_stage(2, 2), OffloadOptimizer(fraction=0.5))
    followed = at_home(applied(mlp(), (*half, OffloadGradients())))
    assert followed == {"root.post", "blocks.2", "blocks.1"}
    named = at_home(applied(mlp(), (*half, OffloadGradients(units=("root.*",)))))
    assert named == {"root.pre", "root.post"}


# ---------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_damaged_programs_are_rejected(way: str, micro_steps: int) -> None:
    """Any transfer, and any wait of a stream that carries one, that is left out."""
    logical = mlp(blocks=1, precision="fp16", clip=1.0, micro_steps=micro_steps)
    program = applied(logical, (*for_stage(2, 2), *WAYS[way]))
    assert verify(program, reference=logical).is_valid

    def is_needed(op: Op) -> bool:
        is_wait = isinstance(op, ops.Wait) and op.on in (*DOWN, OPTIMIZER, UPDATE_IN)
        return isinstance(op, ops.Transfer) or is_wait

    mutants = list(without_each(program, is_needed))
    assert len(mutants) >= 10
    for where, mutant in mutants:
        assert codes(mutant, logical), where


def test_a_statistic_that_adds_to_another_is_rejected() -> None:
    """Only this rank's own sum may be added to, not one that the ranks have combined, nor a scalar of before."""
    logical = mlp(clip=1.0)
    program = applied(logical, (*for_stage(2, 2), *WITH_HALF))
    bare = without_waits(program)
    norms = places(bare, is_of(ops.GradNorm))
    assert len(norms) == 2
    first = at(bare, norms[0])
    assert isinstance(first, ops.GradNorm)
    added = put(bare, norms[0], replace(first, mode=Mode.ACCUMULATE))
    report = verify(derive_waits(added), reference=logical)
    assert codes(report) == {"Z405"}
    assert "adds to" in report.findings[0].sentence
