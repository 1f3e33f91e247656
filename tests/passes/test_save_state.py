"""What ``save`` copies is the whole state at a boundary, whatever the steps beside it do; and hardly delays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from tests.passes.numbers import initial, inputs
from tests.support.covering import covering
from tests.support.edits import mapped, without_ops, without_save
from tests.support.lowering import applied, codes, proved
from tests.support.mutate_saves import SAVE_MUTATIONS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.subjects import CAPTURED, SAVING, subject
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Role, Space, copied_region
from zeroir.ir.contents import SnapshotContent
from zeroir.ir.mesh import COPY_OUT
from zeroir.ir.ops import Op
from zeroir.ir.program import SAVE, Program, Section
from zeroir.memory.footprint import footprint
from zeroir.memory.states import model_state_bytes
from zeroir.passes import manager
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.memory.save_state import SAVE_OUT, SaveState
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import for_options, lower
from zeroir.runtime.checkpoint.parts import saved_parts, saved_quantities
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.state.host_snapshot import SavedState
from zeroir.verify import verify

STAGES = range(4)
LATE = (COPY_OUT, SAVE_OUT, "optimizer", "io")


def saving(
    stage: int,
    *,
    ranks: int = 4,
    micro_steps: int = 1,
    overlap_update: bool = False,
    replicas: int | None = None,
    precision: str = "bf16",
) -> Program:
    logical = mlp(micro_steps=micro_steps, precision=precision)
    passes = for_stage(stage, ranks, overlap_update=overlap_update, replicas=replicas)
    return proved(logical, (*passes, SaveState()))


# ---------------------------------------------------------------------------------------------------------- waits


def copies(program: Program) -> list[ops.ToHost]:
    return [op for op in program.section_by_name[SAVE].body if isinstance(op, ops.ToHost)]


def is_wait_of(program: Program) -> Callable[[Op], bool]:
    """Whether an op waits for a copy."""
    events = {copy.event for copy in copies(program)}
    return lambda op: isinstance(op, ops.Wait) and op.waited in events


def unguarded(program: Program, section: Section) -> Iterator[str]:
    """Sources of copies that an op of the section overwrites on a stream that has not waited for the copy.

    It knows only that copies of one stream are done in order, and that streams learn from each other by waits.
    """
    order = [copy.event for copy in copies(program) if copy.event is not None]
    sources = {copy.source.buffer: copy.event for copy in copies(program) if copy.event}
    done: dict[str, set[str]] = {stream.name: set() for stream in program.streams}
    at_event: dict[str, set[str]] = {e: set(order[: n + 1]) for n, e in enumerate(order)}
    for op in section.body:
        if isinstance(op, ops.Wait):
            done[op.on] |= at_event[op.waited]
            continue
        effect = effects(op)
        for region in (*effect.writes, *effect.accumulates):
            event = sources.get(region.buffer)
            if event is not None and event not in done[effect.stream]:
                yield region.buffer
        if op.event is not None:
            at_event[op.event] = set(done[effect.stream])


CASES = covering(list(product(STAGES, (False, True), (1, 2), (None, 2))), tuple)


@pytest.mark.parametrize(("stage", "overlap_update", "micro_steps", "replicas"), CASES)
def test_every_op_that_overwrites_the_state_waits_for_its_copy(
    stage: int, overlap_update: bool, micro_steps: int, replicas: int | None
) -> None:
    program = saving(
        stage, micro_steps=micro_steps, overlap_update=overlap_update, replicas=replicas
    )
    for section in program.sections:
        assert not list(unguarded(program, section)), section.name
    overwritten = {
        region.buffer
        for op in program.step_ops()
        for region in (*effects(op).writes, *effects(op).accumulates)
    }
    assert overwritten & {copy.source.buffer for copy in copies(program) if copy.event}
    waits = list(filter(is_wait_of(program), program.step_ops()))
    assert len(waits) == len(program.flats), "one wait for all copies of a flat"


def test_the_judge_of_waits_sees_a_missing_one() -> None:
    program = saving(2)
    for section in program.sections:
        bare = without_ops(program, is_wait_of(program)).section_by_name[section.name]
        assert bool(set(unguarded(program, bare))) is (bare != section)


@pytest.mark.parametrize("stage", STAGES)
def test_waits_are_derived_from_effects_alone(stage: int) -> None:
    program = saving(stage, micro_steps=2, overlap_update=True)
    bare = without_waits(program)
    assert not any(map(is_wait_of(program), bare.ops()))
    assert derive_waits(bare) == program


@pytest.mark.parametrize("stage", STAGES)
def test_a_program_changes_by_the_section_its_buffers_and_waits_alone(stage: int) -> None:
    logical = mlp(micro_steps=2, precision="bf16")
    passes = for_stage(stage, 4, overlap_update=True)
    without = proved(logical, passes)
    with_save = proved(logical, (*passes, SaveState()))
    assert replace(without_save(with_save), passes=without.passes) == without
    assert with_save.buffers[: len(without.buffers)] == without.buffers
    assert footprint(with_save).total_bytes == footprint(without).total_bytes


# ----------------------------------------------------------------------------------------------------- what is saved


def held(run: Lockstep, ranks: int) -> list[dict[str, Tensor]]:
    return [{name: t.clone() for name, t in run.buffers(rank).items()} for rank in range(ranks)]


def is_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_saved(saved: Sequence[SavedState], expected: Sequence[dict[str, Tensor]]) -> None:
    for of_rank, buffers in zip(saved, expected, strict=True):
        of_rank.wait()
        for name, copy in of_rank.tensors.items():
            assert is_same_bits(copy.tensor, buffers[name][copy.start : copy.stop]), name
        of_rank.release()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "overlap_update", "micro_steps", "replicas"), CASES)
def test_the_saved_bits_are_those_of_the_boundary_however_late_the_copies_run(
    stage: int, overlap_update: bool, micro_steps: int, replicas: int | None
) -> None:
    program = saving(
        stage, micro_steps=micro_steps, overlap_update=overlap_update, replicas=replicas
    )
    batches = inputs(program, 4, micro_steps)
    for schedule_seed, late_streams in ((0, LATE), (1, ())):
        run = Lockstep(program, schedule_seed=schedule_seed, late_streams=late_streams)
        run.initialise_flats(initial(program))
        for _ in range(2):
            run.step(batches[0])
            saved = run.save_state()
            expected = held(run, 4)
            run.step(batches[1])
            assert held(run, 4)[0]["blocks.0.exp_avg"].ne(expected[0]["blocks.0.exp_avg"]).any()
            assert_saved(saved, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVING)
def test_the_saved_bits_of_a_subject_are_those_of_the_boundary(name: str) -> None:
    """Paged and offloaded states, hybrid meshes, prefetches that cross the update, loss scales, averages."""
    made = subject(name)
    ranks = made.scheduled.mesh.world_size
    run = Lockstep(made.scheduled, late_streams=LATE)
    run.initialise_flats(initial(made.scheduled))
    for batches in made.batches:
        saved = run.save_state()
        expected = held(run, ranks)
        run.step(batches)
        assert_saved(saved, expected)


def test_a_late_copy_without_its_wait_saves_other_bits() -> None:
    """The streams that delay copies would show what a missing wait does."""
    program = saving(3)
    run = Lockstep(without_ops(program, is_wait_of(program)), late_streams=LATE)
    run.initialise_flats(initial(program))
    batches = inputs(program, 4, 1)
    saved = run.save_state()
    expected = held(run, 4)
    run.step(batches[0])
    with pytest.raises(AssertionError):
        assert_saved(saved, expected)


def test_a_save_between_micro_steps_has_the_state_of_the_step_s_beginning() -> None:
    program = saving(2, micro_steps=2, overlap_update=True)
    batches = inputs(program, 4, 2)
    run = Lockstep(program, late_streams=LATE)
    run.initialise_flats(initial(program))
    run.step(batches[0])
    expected = held(run, 4)
    run.micro_step([of_rank[0] for of_rank in batches[1]], is_last=False)
    saved = run.save_state()
    run.micro_step([of_rank[1] for of_rank in batches[1]], is_last=True)
    run.update()
    assert_saved(saved, expected)


@pytest.mark.parametrize(
    "name", [*SAVING, *(pytest.param(name, marks=pytest.mark.slow) for name in CAPTURED)]
)
def test_every_part_of_a_checkpoint_has_a_copy(name: str) -> None:
    program = subject(name).scheduled
    assert SAVE in program.section_by_name
    for rank, coordinate in enumerate(program.mesh.coordinates()):
        ranges = {
            content.buffer: copied_region(content).local_range(program.mesh, coordinate)
            for content in (buffer.holds for buffer in program.buffers)
            if isinstance(content, SnapshotContent)
        }
        for part in saved_parts(program, rank, saved_quantities(program)):
            start, stop = ranges[part.buffer]
            assert start <= part.offset <= part.offset + part.stop - part.start <= stop


@pytest.mark.parametrize("stage", STAGES)
def test_snapshots_take_no_more_host_memory_than_the_state_takes_on_the_device(stage: int) -> None:
    program = saving(stage)
    snapshots = [buffer for buffer in program.buffers if buffer.role is Role.SNAPSHOT]
    states = model_state_bytes(program)
    scalars_bytes = sum(
        b.size_bytes for b in snapshots if b.name.removesuffix(".snapshot") == "step"
    )
    saved_bytes = sum(buffer.size_bytes for buffer in snapshots) - scalars_bytes
    count = 4 if stage == 0 else 1  # Of what all ranks hold alike, each copies a slice.
    assert saved_bytes == (states["master"] + states["state"]) // count
    assert {buffer.space for buffer in snapshots} == {Space.HOST}


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_program_without_the_section_cannot_save_and_says_so() -> None:
    program = proved(mlp(), for_stage(2, 2))
    with pytest.raises(UserError, match=r"^The program cannot save: .* compile it again\.$"):
        Lockstep(program).save_state()


def test_no_pass_may_change_the_state_after_it() -> None:
    program = saving(2, precision="fp32")
    for step in (OverlapUpdate(), SaveState()):
        with pytest.raises(UserError, match="`save-state` has ended"):
            manager.run(program, [step])


def test_every_compiled_program_saves() -> None:
    options = make_options({"stage": 3, "world_size": 2})
    assert for_options(options)[-2] == SaveState()
    program = lower(mlp(), options)
    assert SAVE in program.section_by_name
    assert "Z407" in verify(program).laws


REFUSALS = {
    "drop-wait-for-copy": {"Z105"},
    "late-wait-for-copy": {"Z105"},
    "forget-saved-event": {"Z008", "Z009", "Z202"},
    "save-other-buffer": {"Z008", "Z105", "Z407"},  # Nothing waits for the copy of another buffer.
    "save-other-slice": {"Z407"},
    "use-snapshot": {"Z006", "Z407"},
    "save-less": {"Z407"},
}


@pytest.mark.parametrize("kind", SAVE_MUTATIONS)
def test_a_damaged_save_is_refused(kind: str) -> None:
    damaged: list[Program] = []
    for name in ("stage 2, tied", "stage 3, overlapped", "hybrid", "paged"):
        program = subject(name).scheduled
        assert verify(program).is_valid
        mutants = [SAVE_MUTATIONS[kind](program, Random(seed)) for seed in range(10)]
        damaged += [mutant for mutant in mutants if mutant is not None and mutant != program]
    assert len(damaged) >= 8
    for mutant in damaged:
        assert codes(mutant) & REFUSALS[kind]


def test_a_copy_after_an_overwrite_is_refused() -> None:
    program = saving(1)
    copy = next(copy for copy in copies(program) if copy.source.buffer == "blocks.0.master")
    before = ops.Fill(destination=copy.source, value=0.0, stream=COPY_OUT)
    damaged = mapped(program, lambda op: (before, op) if op is copy else (op,), SAVE)
    assert codes(damaged) == {"Z407"}


def test_a_copy_of_the_wrong_elements_is_refused_by_their_value() -> None:
    """The snapshot's declaration stays, so only the interpretation of the section can tell."""
    program = saving(1)
    first, second = (
        copy
        for copy in copies(program)
        if copy.source.buffer in ("blocks.0.exp_avg", "blocks.1.exp_avg")
    )
    wrong = replace(first, source=second.source)
    damaged = mapped(program, lambda op: (wrong,) if op is first else (op,), SAVE)
    (finding,) = verify(damaged).findings
    assert finding.code == "Z407"
    assert "should be a copy of %blocks.0.exp_avg but holds" in finding.sentence


def test_the_logical_program_may_save_too() -> None:
    program = applied(mlp(), (SaveState(),))
    assert verify(program).is_valid
