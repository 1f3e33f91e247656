"""An optimizer on the host computes the same bits, beside the device's work, and frees the memory that it says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.example_programs import LOGICAL
from tests.passes.numbers import assert_same, inputs
from tests.passes.strategies import Case, cases
from tests.passes.variants import called_twice, frozen
from tests.support.covering import covering
from tests.support.edits import at, is_of, places, put, without_each
from tests.support.examples import examples
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.contents import GRAD, PARAM, FlatContent
from zeroir.ir.mesh import OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.footprint import footprint
from zeroir.passes import manager
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.update_streams import UPDATE_IN, UPDATE_OUT
from zeroir.passes.manager import apply
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.runtime.execution.lockstep import Lockstep

OFFLOAD = OffloadOptimizer()
Training = tuple[int, str, int, float | None, bool, int | None]
"""Stage, precision, micro-steps, clipping, whether the update is overlapped, groups of ranks."""


def _is_possible(training: Training) -> bool:
    _, precision, _, clip, is_overlapped, _ = training
    return not (is_overlapped and (clip is not None or precision == "fp16"))


POSSIBLE: tuple[Training, ...] = tuple(
    filter(
        _is_possible,
        product(
            (0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2), (None, 1.0), (False, True), (None, 2)
        ),
    )
)
CHOSEN = covering(POSSIBLE, tuple)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("stage", "precision", "micro_steps", "clip", "overlap_update", "replicas"),
    [
        pytest.param(*training, marks=() if number < 2 else pytest.mark.slow)
        for number, training in enumerate(CHOSEN)
    ],
)
def test_it_computes_the_same(
    stage: int,
    precision: str,
    micro_steps: int,
    clip: float | None,
    overlap_update: bool,
    replicas: int | None,
) -> None:
    ranks = 4 if replicas else 3
    logical = mlp(
        precision=precision,
        micro_steps=micro_steps,
        clip=clip,
        keep_fp32=precision != "fp32",
        ema=0.9 if stage % 2 else None,
    )
    passes = for_stage(stage, ranks, overlap_update=overlap_update, replicas=replicas)
    before = applied(logical, passes)
    after = manager.run(before, [OFFLOAD, SaveState(), PlanMemory()], reference=logical)
    for seed in (0, 1):
        result = assert_same(after, before, micro_steps, [seed])
        _assert_copies_agree(after, result.lockstep, ranks)


def _assert_copies_agree(program: Program, lockstep: Lockstep, ranks: int) -> None:
    """The host's copy of parameters, which trains, and the device's, which computes, have the same bits."""
    for rank in range(ranks):
        buffers = lockstep.buffers(rank)
        for copy, original in _copies(program).items():
            own, full = buffers[copy], buffers[original]
            coordinate = program.mesh.coordinate(rank)
            number = coordinate.get("dp", coordinate.get("shard", 0))
            start = number * own.numel() if own.numel() < full.numel() else 0
            assert torch.equal(own, full[start : start + own.numel()]), copy


def _copies(program: Program) -> dict[str, str]:
    """The host's copies of parameters, each with the device's buffer."""
    homes: dict[Space, dict[str, str]] = {space: {} for space in Space}
    for buffer in program.buffers:
        if isinstance(buffer.holds, FlatContent) and buffer.holds.quantity == PARAM:
            homes[buffer.space][buffer.holds.flat] = buffer.name
    return {name: homes[Space.DEVICE][flat] for flat, name in homes[Space.HOST].items()}


@examples(4)
@given(cases(world_sizes=(1, 4)), st.integers(0, 2**16))
def test_any_program_computes_the_same(case: Case, schedule_seed: int) -> None:
    before = applied(case.logical(), case.passes())
    after = manager.run(before, [OFFLOAD], reference=case.logical())
    assert_same(after, before, case.micro_steps, [schedule_seed])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "lion"])
def test_every_element_wise_optimizer_computes_the_same(optimizer: str) -> None:
    logical = mlp(optimizer=optimizer, precision="bf16", tied=True)
    passes = for_stage(2, 3, overlap_update=True)
    assert_same(proved(logical, (*passes, OFFLOAD)), applied(logical, passes), seeds=[1])


@pytest.mark.parametrize("logical", [frozen(), called_twice()], ids=["frozen", "called twice"])
def test_frozen_parameters_and_units_called_twice_train_as_before(logical: Program) -> None:
    for stage in (0, 3):
        passes = for_stage(stage, 3)
        assert_same(proved(logical, (*passes, OFFLOAD)), applied(logical, passes), seeds=[3])


@pytest.mark.slow
@pytest.mark.parametrize("overflowing", [(), (1,), (0, 1, 2)])
def test_an_overflow_on_some_ranks_skips_the_update_of_all(overflowing: tuple[int, ...]) -> None:
    logical = mlp(precision="fp16", clip=1.0)
    batches = inputs(logical, 3, 1)
    for rank in overflowing:
        (batch,) = batches[0][rank]
        assert isinstance(batch, dict)
        batches[0][rank] = [{path: values * 1e4 for path, values in batch.items()}]
    passes = for_stage(2, 3)
    program = proved(logical, (*passes, OFFLOAD))
    result = assert_same(program, applied(logical, passes), seeds=[2], batches=batches)
    assert result.skipped[0] is bool(overflowing)


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_device_keeps_parameters_and_gradients_alone(stage: int, precision: str) -> None:
    logical = mlp(precision=precision, ema=0.9)
    before = proved(logical, for_stage(stage, 4))
    after = apply(OFFLOAD, before)
    moved = [b for b in before.buffers if b.role in (Role.MASTER, Role.STATE)]
    assert moved
    resting = {
        space: sum(b.size_bytes for b in after.buffers if b.is_persistent and b.space is space)
        for space in Space
    }
    resting_before = sum(
        b.size_bytes for b in before.buffers if b.is_persistent and b.space is Space.DEVICE
    )
    assert resting[Space.DEVICE] == resting_before - sum(b.size_bytes for b in moved)
    assert footprint(after).resting_bytes == resting[Space.DEVICE]
    assert footprint(after).arena_bytes <= footprint(before).arena_bytes
    for buffer in after.buffers:
        if isinstance(buffer.holds, FlatContent):
            is_on_device = buffer.space is Space.DEVICE
            assert is_on_device is (
                buffer.holds.quantity in (PARAM, GRAD) and ".host" not in buffer.name
            )


@pytest.mark.parametrize("overlap_update", [False, True])
def test_host_memory_on_the_way_does_not_grow_with_the_model(overlap_update: bool) -> None:
    sizes = []
    for blocks in (3, 6):
        passes = (*for_stage(3, 2, overlap_update=overlap_update), OFFLOAD, PlanMemory())
        program = applied(mlp(blocks=blocks, precision="bf16"), passes)
        sizes.append(footprint(program, space=Space.HOST).arena_bytes)
    assert sizes[0] == sizes[1] > 0


# --------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("overlap_update", [False, True])
def test_each_op_has_the_stream_of_its_memory(stage: int, overlap_update: bool) -> None:
    program = applied(
        mlp(precision="bf16", ema=0.9),
        (*for_stage(stage, 3, overlap_update=overlap_update), OFFLOAD),
    )
    flats = len(program.flats)
    streams: dict[type[Op], set[str]] = {}
    for op in program.ops():
        if not isinstance(op, ops.Wait):
            streams.setdefault(type(op), set()).add(op.stream)
    for kind in (ops.OptimizerStep, ops.Average):
        assert streams[kind] == {OPTIMIZER}
    assert streams[ops.ToDevice] == {UPDATE_IN}
    copies = [op for op in program.ops() if isinstance(op, ops.ToHost) and op.stream == UPDATE_OUT]
    assert len(copies) == flats


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_next_gradient_comes_down_while_the_host_updates(micro_steps: int) -> None:
    """Neither a copy down nor a copy up of neighbours waits for the update between them."""
    program = applied(
        mlp(precision="bf16", clip=1.0, micro_steps=micro_steps), (*for_stage(2, 3), OFFLOAD)
    )
    body = program.section_by_name[UPDATE].body
    masks = happens.before(body)
    steps = [i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep)]
    down = [
        i for i, op in enumerate(body) if isinstance(op, ops.ToHost) and op.stream == UPDATE_OUT
    ]
    up = [i for i, op in enumerate(body) if isinstance(op, ops.ToDevice)]
    assert len(steps) == len(down) == len(up) == len(program.flats) > 3
    for number in range(1, len(steps)):
        assert not masks[down[number]] >> steps[number - 1] & 1
        assert not masks[steps[number]] >> up[number - 1] & 1
    # The second but next waits: so many gradients and no more are on the way.
    assert masks[down[3]] >> steps[1] & 1


def test_a_gradient_comes_down_as_soon_as_it_is_reduced() -> None:
    program = applied(mlp(precision="bf16"), (*for_stage(3, 3, overlap_update=True), OFFLOAD))
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    backward = [i for i, op in enumerate(body) if isinstance(op, ops.Compute)]
    steps = [i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep)]
    assert 0 < steps[0] < backward[-1]
    for index, op in enumerate(body):
        if isinstance(op, ops.Compute | ops.ReduceScatter):
            assert not any(masks[index] >> step & 1 for step in steps), (
                "the device waits for no update"
            )


def test_waits_are_derived_from_effects_alone() -> None:
    program = applied(mlp(micro_steps=2), (*for_stage(3, 3, overlap_update=True), OFFLOAD))
    assert derive_waits(without_waits(program)) == program
    for section in program.sections:
        assert happens.unordered(section.body, program) == []


# ---------------------------------------------------------------------------------------------------------- options


def test_a_fraction_offloads_those_whose_gradients_come_first() -> None:
    logical = mlp(blocks=4)
    passes = for_stage(3, 2)
    program = proved(logical, (*passes, OffloadOptimizer(fraction=0.5)))
    steps = [op for op in program.ops() if isinstance(op, ops.OptimizerStep)]
    on_host = {op.param.buffer.split(".param")[0] for op in steps if op.stream == OPTIMIZER}
    flats = program.flat_by_name
    assert on_host == {"root.post", "blocks.3", "blocks.2"}
    assert sum(flats[name].padded_numel for name in on_host) * 2 >= sum(
        flat.padded_numel for flat in program.flats
    )
    assert_same(program, applied(logical, passes), seeds=[1])


def test_units_name_what_is_offloaded() -> None:
    program = proved(mlp(), (*for_stage(2, 2), OffloadOptimizer(units=("blocks.*",))))
    states = [b for b in program.buffers if b.role is Role.STATE]
    for buffer in states:
        assert (buffer.space is Space.HOST) is buffer.name.startswith("blocks.")


def test_optimizers_on_whole_parameters_and_wrong_options_are_refused() -> None:
    program = applied(mlp(optimizer="adafactor"), for_stage(2, 2))
    with pytest.raises(UserError, match="cannot offload adafactor, which updates the whole"):
        OFFLOAD(program)
    with pytest.raises(UserError, match=r"above 0 and at most 1, not 2\.0"):
        OffloadOptimizer(fraction=2.0)
    with pytest.raises(UserError, match="names no unit with `heads`"):
        OffloadOptimizer(units=("heads",))(applied(LOGICAL, for_stage(2, 2)))


# ---------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_damaged_programs_are_rejected(precision: str) -> None:
    """Each transfer left out, each wait that concerns one left out, each step on the device's stream."""
    logical = mlp(blocks=1, precision=precision, clip=1.0)
    program = proved(logical, (*for_stage(2, 2), OFFLOAD))

    def is_needed(op: Op) -> bool:
        is_wait = isinstance(op, ops.Wait) and op.on in (UPDATE_IN, OPTIMIZER)
        return isinstance(op, ops.Transfer) or is_wait

    mutants = list(without_each(program, is_needed))
    for place in places(program, is_of(ops.OptimizerStep)):
        op = at(program, place)
        assert isinstance(op, ops.OptimizerStep)
        moved = put(program, place, replace(op, stream="compute"))
        mutants.append((str(place), moved))
    assert len(mutants) > 12
    for where, mutant in mutants:
        assert codes(mutant, logical), where
