"""Paged optimizer states: the same numbers, the device memory that was asked for, and no more traffic than need be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.numbers import assert_same, inputs
from tests.passes.strategies import Case, cases
from tests.support.edits import without_each
from tests.support.examples import examples
from tests.support.groups import in_groups
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tools.bench_paging import page_bytes_by_page, planned_bytes
from tools.page_replacement import belady, lru
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Algorithm, Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Flat, Program, Section
from zeroir.memory.footprint import footprint
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.common.order import derive_waits
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import flatten

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def state_bytes(program: Program, *spaces: Space) -> int:
    """The bytes of the states of elements that rest in these spaces."""
    return sum(
        buffer.size_bytes
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and buffer.holds.quantity in STATES
        and buffer.space in spaces
    )


def page_bytes(program: Program) -> int:
    return sum(buffer.size_bytes for buffer in program.buffers if buffer.role is Role.PAGE)


# -------------------------------------------------------------------------------------------------------- numbers


def check_equal(
    logical: Program,
    base: tuple[Pass, ...],
    micro_steps: int = 1,
    seed: int = 0,
    share: float = 0.6,
    page: int = 2048,
) -> Program:
    """Compare a run with and without pages; the paged program, with its save and its places."""
    before = applied(logical, base)
    whole_bytes = state_bytes(before, Space.DEVICE)
    device_bytes = max(2 * page, int(share * whole_bytes))
    paging = PageOptimizer(device_bytes=device_bytes, page_bytes=page)
    after = proved(logical, (*base, paging, SaveState(), PlanMemory()))
    result = assert_same(after, before, micro_steps, [seed])
    assert any(value.abs().sum() > 0 for value in result.state.values())
    assert state_bytes(after, Space.DEVICE) + page_bytes(after) <= device_bytes
    assert state_bytes(after, Space.DEVICE, Space.HOST) == whole_bytes
    return after


PAGED = cases(world_sizes=(1, 4)).map(lambda case: replace(case, dim=48, blocks=2))


@examples(6)
@given(PAGED, st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.9]))
def test_it_computes_the_same(case: Case, seed: int, share: float) -> None:
    if case.optimizer == "sgd":  # It has no states.
        case = replace(case, optimizer="lion")
    page = 2048 if case.optimizer.startswith("adam") else 1024
    logical = case.logical()
    check_equal(logical, case.passes(), case.micro_steps, seed, share=share, page=page)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_parts_of_slices_are_updated_where_they_stand(stage: int) -> None:
    """In FP32 stages 1 and 2 update this rank's slice of the whole parameters, and a state rests in two buffers."""
    logical = in_groups(mlp(blocks=2, dim=64, clip=1.0))
    after = check_equal(logical, for_stage(stage, 3), seed=stage)
    steps = [op for op in after.ops() if isinstance(op, ops.OptimizerStep)]
    assert any(op.param.part is not None for op in steps) is (stage in (1, 2))
    if stage:
        assert any(
            isinstance(b.holds, FlatContent) and b.holds.stride is not None for b in after.buffers
        )


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "micro_steps"), [(0, 2), (1, 4), (2, 1), (3, 8)])
def test_it_pages_in_the_backward(stage: int, micro_steps: int) -> None:
    logical = mlp(blocks=3, dim=48, precision="bf16", tied=True, micro_steps=micro_steps)
    base = for_stage(stage, 3, overlap_update=True)
    after = check_equal(logical, base, micro_steps, seed=stage)
    body = after.section_by_name[LAST_MICRO_STEP].body
    pages = {buffer.name for buffer in after.buffers if buffer.role is Role.PAGE}
    arrivals = [
        op for op in body if isinstance(op, ops.ToDevice) and op.destination.buffer in pages
    ]
    assert arrivals
    assert not any(isinstance(op, ops.ToDevice) for op in after.section_by_name[UPDATE].body)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_ranks_hold_the_same_pages(stage: int) -> None:
    logical = mlp(blocks=2, dim=64, precision="bf16", keep_fp32=True)
    check_equal(logical, for_stage(stage, 4, replicas=2))


@pytest.mark.parametrize("overflowing", [(), (1,), (0, 1, 2)])
def test_a_skipped_step_leaves_pages_as_they_were(overflowing: tuple[int, ...]) -> None:
    logical = mlp(blocks=2, dim=48, precision="fp16", ema=0.5, clip=1.0)
    base = for_stage(1, 3)
    after = proved(logical, (*base, PageOptimizer(device_bytes=8192, page_bytes=2048)))
    batches = inputs(logical, 3, 1)
    for rank in overflowing:
        x = flatten(batches[1][rank][0]).tensors["x"]
        batches[1][rank][0] = {"x": x * 1e3}
    result = assert_same(after, applied(logical, base), seeds=[5], batches=batches)
    assert result.skipped[1] is bool(overflowing)


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3))])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_parts_of_the_state_are_offloaded_beside_pages(stage: int, precision: str) -> None:
    logical = mlp(blocks=2, dim=64, precision=precision, clip=1.0, micro_steps=2)
    base = for_stage(stage, 3)
    before = applied(logical, base)
    device_bytes = int(0.6 * state_bytes(before, Space.DEVICE))
    offload = (OffloadGradients(), OffloadParameters(), OffloadActivations())
    paging = PageOptimizer(device_bytes=device_bytes, page_bytes=2048)
    after = proved(logical, (*base, paging, *offload, SaveState(), PlanMemory()))
    assert_same(after, before, 2, [stage])
    assert state_bytes(after, Space.DEVICE) + page_bytes(after) <= device_bytes


def test_pages_may_rest_on_a_disk() -> None:
    """Each page is loaded before it comes in, and stored after it went out: no store can be left out."""
    logical = mlp(blocks=2, dim=64)
    base = for_stage(1, 3, overlap_update=True)
    paging = PageOptimizer(device_bytes=17_000, page_bytes=2048)
    after = proved(logical, (*base, paging, OffloadToDisk()))
    assert_same(after, applied(logical, base), seeds=[1])

    def is_of_a_state(op: Op) -> bool:
        return isinstance(op, ops.Store) and "exp_avg" in op.destination.buffer

    stores = list(without_each(after, is_of_a_state))
    assert stores
    for where, mutant in stores[:3]:
        found = codes(derive_waits(mutant))
        assert found, where
        assert found <= {"Z403", "Z502"}, where


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("lion", marks=pytest.mark.slow)])
def test_other_optimizers_have_pages_too(stage: int, optimizer: str) -> None:
    """Muon's momentum is paged where its direction is computed, of matrices alone; AdamW's states beside it, too."""
    logical = compile_with(
        "tests/support/models/traps.py", make_options({"optimizer": optimizer, "world_size": 3})
    ).logical
    base = for_stage(stage, 3)
    size_bytes = state_bytes(applied(logical, base), Space.DEVICE)
    paging = PageOptimizer(device_bytes=int(0.6 * size_bytes), page_bytes=2048)
    after = proved(logical, (*base, paging))
    pages = {buffer.name for buffer in after.buffers if buffer.role is Role.PAGE}
    kind = ops.Direction if optimizer == "muon" else ops.OptimizerStep
    paged = [op for op in after.ops() if isinstance(op, kind) and op.states]
    assert any(op.states[0].buffer in pages for op in paged)
    model_file = load_model_file("tests/support/models/traps.py")
    states = []
    for program in (applied(logical, base), after):
        lockstep = Lockstep(program, schedule_seed=stage)
        lockstep.initialise(model_file.model, seed=0)
        for _ in range(2):
            lockstep.step([[model_file.batch()]] * 3)
        states.append(lockstep.full_state())
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_states_take_the_device_memory_that_was_asked_for(share: float) -> None:
    """All but what a page of 256 elements does not fill: slots are whole pages, and the rest rests on the device."""
    logical = mlp(blocks=3, dim=64)
    base = for_stage(3, 2)
    before = applied(logical, base)
    device_bytes = int(state_bytes(before, Space.DEVICE) * share)
    paging = PageOptimizer(device_bytes=device_bytes, page_bytes=2048)
    after = applied(logical, (*base, paging, PlanMemory()))
    taken = state_bytes(after, Space.DEVICE) + page_bytes(after)
    assert device_bytes - 2048 < taken <= device_bytes
    moved = state_bytes(before, Space.DEVICE) - state_bytes(after, Space.DEVICE)
    for space, more in ((Space.HOST, moved), (Space.DEVICE, -moved)):
        resting = [footprint(program, space=space).resting_bytes for program in (before, after)]
        assert resting[1] - resting[0] == more


def test_nothing_changes_where_all_states_fit() -> None:
    program = applied(mlp(), for_stage(2, 2))
    size_bytes = state_bytes(program, Space.DEVICE)
    assert PageOptimizer(device_bytes=size_bytes)(program) is program
    assert PageOptimizer(device_bytes=size_bytes - 1, page_bytes=2048)(program) is not program


# -------------------------------------------------------------------------------------------------------- traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The sizes of the flats of an update in units of 256 elements, and how many states each element has."""

    numels: tuple[int, ...]
    algorithm: Algorithm

    def program(self) -> Program:
        """One step a flat and nothing else."""
        buffers: list[Buffer] = []
        body: list[Op] = []
        for number, size in enumerate(self.numels):
            names = ("param", "grad", *self.algorithm.state_names)
            own = {name: _buffer(f"f{number}", name, size * 256) for name in names}
            buffers += own.values()
            scalar = Region(buffer="scalar", offset=0, numel=1)
            step = ops.OptimizerStep(
                algorithm=self.algorithm,
                param=whole(own["param"]),
                grad=whole(own["grad"]),
                states=tuple(whole(own[name]) for name in self.algorithm.state_names),
                step=scalar,
                lr=scalar,
                hyper=scalar,
                gradient_divisor=scalar,
                stream="compute",
            )
            body.append(step)
        flats = tuple(
            Flat(
                name=f"f{number}",
                unit="u",
                dtype=DType.F32,
                is_trainable=True,
                padded_numel=256 * size,
                slots=(),
            )
            for number, size in enumerate(self.numels)
        )
        return Program(
            mesh=Mesh(axes=(Axis(name="dp", size=1),)),
            flats=flats,
            buffers=tuple(buffers),
            sections=(Section(name=UPDATE, body=tuple(body)),),
        )


def _buffer(flat: str, quantity: str, numel: int) -> Buffer:
    return Buffer(
        name=f"{flat}.{quantity}",
        dtype=DType.F32,
        numel=numel,
        space=Space.DEVICE,
        role=Role.STATE,
        holds=FlatContent(quantity=quantity, flat=flat),
    )


UPDATES = st.builds(
    Update,
    numels=st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple),
    algorithm=st.sampled_from([Algorithm.ADAMW, Algorithm.MOMENTUM]),
)
STEPS = 6


@examples(60)
@given(UPDATES, st.integers(1, 6), st.integers(2, 40), st.integers(0, 1023))
def test_traffic_is_within_a_page_of_belady(
    update: Update, page_size: int, frames: int, odd_bytes: int
) -> None:
    """Beside the slots there is a memory for some pages: with that, no rule of replacement moves fewer."""
    before = update.program()
    unit_bytes = 1024 * len(update.algorithm.state_names)
    largest = min(page_size, max(update.numels))
    size_bytes = page_size * unit_bytes + odd_bytes
    device_bytes = frames * largest * unit_bytes + odd_bytes
    paging = PageOptimizer(device_bytes=device_bytes, page_bytes=size_bytes)
    after = paging(before)
    pages = list(page_bytes_by_page(before, size_bytes))
    slots = [buffer for buffer in after.buffers if buffer.role is Role.PAGE]
    steps = [op for op in after.ops() if isinstance(op, ops.OptimizerStep)]
    names = {buffer.name for buffer in slots}
    planned = sum(op.states[0].buffer in names for op in steps)
    if after is before:
        assert sum(update.numels) * unit_bytes <= device_bytes
        return
    capacity = device_bytes // (largest * unit_bytes) - len(slots)
    accesses = pages * STEPS
    assert planned * STEPS <= len(belady(accesses, capacity).came_in)
    assert planned * STEPS <= len(belady(accesses, capacity + 1).came_in) + STEPS
    incoming, outgoing = planned_bytes(after)
    assert incoming == outgoing == state_bytes(after, Space.HOST)
    assert state_bytes(after, Space.DEVICE) + page_bytes(after) <= device_bytes


@given(st.integers(2, 12), st.integers(1, 12))
@examples(40)
def test_the_rules_miss_what_theory_says_of_a_cycle(pages: int, frames: int) -> None:
    steps = 5 * (pages - 1)
    first = len(belady(range(pages), frames).came_in)
    in_cycles = len(belady([*range(pages)] * (steps + 1), frames).came_in) - first
    if frames >= pages:
        assert in_cycles == 0
        return
    assert abs(in_cycles - steps * pages * (pages - frames) / (pages - 1)) <= pages
    assert len(lru([*range(pages)] * 3, frames).came_in) == 3 * pages


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("device_bytes", "page", "sentence"),
    [
        (4095, 2048, "has no room on the device for 2 pages of 2048 bytes"),
        (0, 2048, "has no room on the device for 2 pages"),
        (4096, 2047, "have 2048: raise page_bytes"),
        (4096, 0, "raise page_bytes"),
    ],
)
def test_too_little_memory_is_one_sentence(device_bytes: int, page: int, sentence: str) -> None:
    program = applied(mlp(blocks=2, dim=48), for_stage(2, 2))
    with pytest.raises(UserError, match=sentence) as caught:
        PageOptimizer(device_bytes=device_bytes, page_bytes=page)(program)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1)])
def test_negative_amounts_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="at least 0"):
        PageOptimizer(device_bytes=sizes[0], page_bytes=sizes[1])


def test_settings_found_by_places_of_states_are_refused() -> None:
    """Muon's direction takes the settings of several groups by the places of its states."""
    update = Update(numels=(4, 4), algorithm=Algorithm.MOMENTUM).program()
    scalar = Region(buffer="scalar", offset=0, numel=1)
    body = tuple(
        ops.Direction(
            algorithm=Algorithm.MUON,
            grad=op.grad,
            states=op.states,
            direction=op.grad,
            step=scalar,
            lr=scalar,
            hyper=scalar,
            gradient_divisor=scalar,
            stream="compute",
            group="matrices",
            others=(ops.GroupSettings(group="heads", lr=scalar, hyper=scalar),),
        )
        for op in update.ops()
        if isinstance(op, ops.OptimizerStep)
    )
    program = replace(update, sections=(Section(name=UPDATE, body=body),))
    with pytest.raises(UserError, match="the groups matrices and heads by the places"):
        PageOptimizer(device_bytes=4096, page_bytes=1024)(program)


def test_passes_that_move_the_states_come_before_it() -> None:
    logical = mlp()
    paging = PageOptimizer(device_bytes=8192, page_bytes=2048)
    stage = for_stage(0, 2)
    for later in (*for_stage(1, 2)[1:], *for_stage(0, 2, overlap_update=True)[1:], paging):
        with pytest.raises(UserError, match="has ended"):
            manager.run(logical, (*stage, paging, later))
    with pytest.raises(UserError, match="a state that no section saves"):
        manager.run(logical, (*stage, SaveState(), paging))
