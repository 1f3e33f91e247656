"""Buffers at home on disk: the same numbers, each element once each way, and host memory that pieces bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_same, initial, inputs
from tests.passes.strategies import Case, cases
from tests.support.covering import covering
from tests.support.edits import at, is_of, places, put, without_each
from tests.support.examples import examples
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import IO, OPTIMIZER
from zeroir.ir.ops import Op
from zeroir.ir.program import SAVE, UPDATE, Program
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.passes import manager
from zeroir.passes.manager import apply
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify

PIECE_NUMEL = 4096
TO_DISK = OffloadToDisk(piece_numel=PIECE_NUMEL)
CASES = [
    (stage, precision, micro_steps, clip, overlap_update, has_parameters)
    for stage, precision, micro_steps, clip, overlap_update, has_parameters in product(
        (0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2), (None, 1.0), (False, True), (False, True)
    )
    if not (overlap_update and (clip is not None or precision == "fp16"))
]


def offloaded(
    stage: int = 1,
    world_size: int = 2,
    *,
    dim: int = 128,
    precision: str = "bf16",
    piece_numel: int = PIECE_NUMEL,
) -> Program:
    """A program with its optimizer on disk; the largest flats have several pieces on each rank."""
    logical = mlp(dim=dim, precision=precision, ema=0.9)
    plain = applied(logical, for_stage(stage, world_size))
    return apply(OffloadToDisk(piece_numel=piece_numel), apply(OffloadOptimizer(), plain))


@pytest.mark.parametrize(
    ("stage", "precision", "micro_steps", "clip", "overlap_update", "has_parameters"),
    [
        pytest.param(*case, marks=() if number < 2 else pytest.mark.slow)
        for number, case in enumerate(covering(CASES, tuple))
    ],
)
def test_no_bit_changes(
    stage: int,
    precision: str,
    micro_steps: int,
    clip: float | None,
    overlap_update: bool,
    has_parameters: bool,
) -> None:
    logical = mlp(dim=96, precision=precision, micro_steps=micro_steps, clip=clip, ema=0.9)
    plain = applied(logical, for_stage(stage, 3, overlap_update=overlap_update))
    moving = [OffloadOptimizer(), *([OffloadParameters()] if has_parameters else [])]
    passes = [*moving, TO_DISK, SaveState(), PlanMemory()]
    program = manager.run(plain, passes, reference=logical)
    assert_same(program, plain, micro_steps, (0, 1))


@pytest.mark.slow
@examples(4)
@given(cases(world_sizes=(1, 4)), st.integers(0, 2**16))
def test_no_bit_of_any_program_changes(case: Case, schedule_seed: int) -> None:
    plain = applied(case.logical(), case.passes())
    passes = [OffloadOptimizer(), OffloadParameters(), TO_DISK]
    program = manager.run(plain, passes, reference=case.logical())
    assert_same(program, plain, case.micro_steps, [schedule_seed])


def test_host_memory_keeps_what_would_travel_most() -> None:
    logical = mlp(dim=96, precision="bf16")
    plain = applied(logical, for_stage(3, 3))
    moved = applied(plain, (OffloadOptimizer(), OffloadParameters()))
    on_disk = apply(TO_DISK, moved)
    travelling = moved_bytes(on_disk, on_disk.step_ops(), ops.Load, ops.Store)
    size_bytes = {b.name: b.size_bytes for b in on_disk.buffers if b.space is Space.DISK}
    # Parameters of blocks are loaded in the forward and in the backward, and stored; states are loaded once.
    often = {name for name in size_bytes if travelling[name] == 3 * size_bytes[name]}
    assert {name.split(".")[-1] for name in often} == {"param"}
    room_bytes = sum(size_bytes[name] for name in often) + min(size_bytes.values())
    cached = manager.run(
        moved,
        [replace(TO_DISK, cache_bytes=room_bytes), SaveState(), PlanMemory()],
        reference=logical,
    )
    kept = size_bytes.keys() - {b.name for b in cached.buffers if b.space is Space.DISK}
    assert often < kept
    assert sum(size_bytes[name] for name in kept) <= room_bytes
    left = moved_bytes(cached, cached.step_ops(), ops.Load, ops.Store)
    assert left == {name: travelling[name] for name in travelling.keys() - kept}
    assert_same(cached, plain)
    all_cached = apply(replace(TO_DISK, cache_bytes=sum(size_bytes.values())), moved)
    assert (all_cached.buffers, all_cached.sections) == (moved.buffers, moved.sections)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_saved_values_come_back_from_the_disk(stage: int) -> None:
    logical = mlp(blocks=5, dim=96, batch=64)
    plain = applied(logical, for_stage(stage, 2))
    passes = [OffloadActivations(smallest=0), TO_DISK, PlanMemory()]
    program = manager.run(plain, passes, reference=logical)
    saved = {
        b.name: b.size_bytes
        for b in program.buffers
        if b.role is Role.SAVED and b.space is Space.DISK
    }
    assert len(saved) > 4
    for kind in (ops.Load, ops.Store):
        assert moved_bytes(program, program.step_ops(), kind) == saved
    assert_same(program, plain, seeds=(0, 1))


def moved_bytes(
    program: Program, body: Iterable[Op], *kinds: type[ops.Load | ops.Store]
) -> Counter[str]:
    """The bytes that loads or stores move on one rank, by the buffer on disk."""
    moved: Counter[str] = Counter()
    for op in body:
        if isinstance(op, kinds):
            region = op.source if isinstance(op, ops.Load) else op.destination
            itemsize_bytes = program.buffer_by_name[region.buffer].dtype.itemsize_bytes
            moved[region.buffer] += region.local_numel(program.mesh) * itemsize_bytes
    return moved


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_update_moves_each_element_once_each_way(stage: int, precision: str) -> None:
    program = offloaded(stage, precision=precision)
    on_disk = {b.name: b.size_bytes for b in program.buffers if b.space is Space.DISK}
    assert {program.buffer_by_name[name].role for name in on_disk} >= {Role.STATE}
    assert not [
        b.name
        for b in program.buffers
        if b.is_persistent and b.role is Role.STATE and b.name not in on_disk
    ]
    body = program.section_by_name[UPDATE].body
    assert moved_bytes(program, body, ops.Load) == on_disk
    assert moved_bytes(program, body, ops.Store) == on_disk


def test_the_file_gets_the_bytes_of_the_program(tmp_path: Path) -> None:
    program = offloaded()
    lockstep = Lockstep(program, disk_folder=tmp_path)
    lockstep.initialise_flats(initial(program))
    for batches in inputs(program, 2, 1):
        disks = [memory.disk for memory in lockstep._memories]
        before = [(disk.read_bytes, disk.written_bytes) for disk in disks]
        lockstep.step(batches)
        for disk, (read_bytes, written_bytes) in zip(disks, before, strict=True):
            for kind, found in (
                (ops.Load, disk.read_bytes - read_bytes),
                (ops.Store, disk.written_bytes - written_bytes),
            ):
                wanted = [op for op in program.step_ops() if isinstance(op, kind)]
                assert found == sum(whole_page_bytes(program, op) for op in wanted)


def whole_page_bytes(program: Program, op: Op) -> int:
    """The bytes of a load or store, whose last page is transferred whole."""
    assert isinstance(op, ops.Load | ops.Store)
    buffer = program.buffer_by_name[op.source.buffer]
    return -(-op.source.numel * buffer.dtype.itemsize_bytes // 4096) * 4096


def visits(program: Program) -> frozenset[str]:
    """The buffers on the host for what is on disk."""
    return frozenset(op.destination.buffer for op in program.ops() if isinstance(op, ops.Load))


def test_memory_for_visits_does_not_grow_with_the_flats() -> None:
    """Two pieces of four buffers: masters, averages, and two states."""
    counts: list[int] = []
    for dim in (128, 256):
        program = offloaded(dim=dim)
        staging = visits(program)
        counts.append(len(staging))
        lifetimes = Lifetimes.of(program)
        lives = [life for life, name in enumerate(lifetimes.buffers) if name in staging]
        sizes = [program.buffer_by_name[name].size_bytes for name in lifetimes.buffers]
        assert most_live(lifetimes, lives, sizes).size_bytes == 2 * 4 * PIECE_NUMEL * 4
    assert counts[0] < counts[1]


def test_loads_updates_and_stores_of_neighbours_run_at_once() -> None:
    body = offloaded(dim=256).section_by_name[UPDATE].body
    masks = happens.before(body)
    steps = [i for i, op in enumerate(body) if isinstance(op, ops.OptimizerStep)]
    assert len(steps) > 6

    def around(step: int, kind: type[ops.Load | ops.Store]) -> list[int]:
        """The transfers of the visits of a step."""
        op = body[step]
        assert isinstance(op, ops.OptimizerStep)
        own = {op.param.buffer, *(state.buffer for state in op.states)}
        return [
            index
            for index, other in enumerate(body)
            if isinstance(other, kind)
            and (other.destination if isinstance(other, ops.Load) else other.source).buffer in own
        ]

    for step, following, third in zip(steps[1:], steps[2:], steps[3:], strict=False):
        loads = around(following, ops.Load)
        assert len(loads) == 3
        for load in loads:
            assert not masks[load] >> step & 1, "the next piece comes beside the update of this one"
        for store in around(step, ops.Store):
            assert not masks[following] >> store & 1, "the next update does not wait for a store"
            # Only two pieces are there at a time.
            assert all(masks[load] >> store & 1 for load in around(third, ops.Load))


def test_a_state_on_disk_has_no_copies() -> None:
    program = apply(SaveState(), offloaded())
    assert SAVE not in program.section_by_name
    assert not [b for b in program.buffers if b.role is Role.SNAPSHOT]


def test_only_what_is_asked_for_moves() -> None:
    logical = mlp(precision="fp32")
    plain = applied(logical, for_stage(2, 2))
    assert TO_DISK(plain) is plain
    both = apply(OffloadParameters(), apply(OffloadOptimizer(), plain))
    for what, quantities in (("optimizer", {"exp_avg", "exp_avg_sq"}), ("parameters", {"param"})):
        program = OffloadToDisk(what=(what,))(both)
        contents = [b.holds for b in program.buffers if b.space is Space.DISK]
        assert {c.quantity for c in contents if isinstance(c, FlatContent)} == quantities
    # The parameters that the host trains belong to the optimizer while others compute with copies on the device.
    program = OffloadToDisk(what=("optimizer",))(apply(OffloadOptimizer(), plain))
    assert {b.role for b in program.buffers if b.space is Space.DISK} == {Role.STATE, Role.PARAM}


@pytest.mark.parametrize(
    ("what", "piece_numel", "sentence"),
    [
        (("gradients",), 4096, "has optimizer, parameters and activations"),
        (("optimizer",), 1000, "a multiple of 4096 above 0, not 1000"),
    ],
)
def test_options_that_make_no_sense(what: tuple[str, ...], piece_numel: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        OffloadToDisk(what=what, piece_numel=piece_numel)(mlp())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_damaged_programs_are_rejected(precision: str) -> None:
    """Each load, store and wait for one left out, or carried out by another stream."""
    logical = mlp(blocks=1, dim=96, precision=precision)
    program = applied(logical, (*for_stage(2, 1), OffloadOptimizer(), TO_DISK))
    assert verify(program, reference=logical).is_valid
    mutants: list[tuple[str, Program]] = []
    for place in places(program, is_of(ops.Load, ops.Store)):
        op = at(program, place)
        assert isinstance(op, ops.Load | ops.Store)
        moved = put(program, place, replace(op, stream="compute"))
        mutants.append((f"{place} by compute", moved))

    def is_needed(op: Op) -> bool:
        is_wait = isinstance(op, ops.Wait) and op.on in (IO, OPTIMIZER)
        return isinstance(op, ops.Load | ops.Store) or is_wait

    mutants += without_each(program, is_needed)
    assert len(mutants) > 30
    for where, mutant in mutants:
        assert codes(mutant, logical), where
