"""Saved values wait in host memory: no bit changes, the device holds what the text shows, and every wait is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import figure, machine
from tests.passes import happens
from tests.passes.numbers import assert_equal, initial, inputs, run
from tests.passes.strategies import Case, cases
from tests.passes.variants import called_twice
from tests.runtime.workers_cases import varied
from tests.support.eager import traced
from tests.support.examples import examples
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.cost.simulate import simulate
from zeroir.errors import UserError
from zeroir.frontend import load_model_file
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import AheadBound, BoundKind
from zeroir.ir.buffers import Role, Space
from zeroir.ir.mesh import COMPUTE, COPY_IN, COPY_OUT
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, MICRO_STEP, Program, Section
from zeroir.ir.text import parse, print_program
from zeroir.memory.footprint import footprint
from zeroir.passes.base import Pass
from zeroir.passes.common.order import derive_waits
from zeroir.passes.memory.recompute import Recompute
from zeroir.passes.memory.select_saved import SelectSaved
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.pipelines import for_options, parse_spec
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "support" / "models"
ALL = OffloadActivations(smallest=0)


def with_copies(stage: int = 3, *, blocks: int = 4, batch: int = 4, ranks: int = 3) -> Program:
    return applied(mlp(blocks=blocks, batch=batch), (*for_stage(stage, ranks), ALL))


def copied(section: Section, kind: type[ops.Transfer]) -> list[str]:
    """The sources of the copies of a section, in order."""
    return [op.source.buffer for op in section.body if isinstance(op, kind)]


# ------------------------------------------------------------------------------------------------------ the numbers

OTHERS: tuple[tuple[Pass, ...], ...] = ((), (SelectSaved(),), (SelectSaved(), Recompute()))


@pytest.mark.slow
@examples(10)
@given(cases(world_sizes=(1, 4)), st.sampled_from(OTHERS), st.integers(0, 2**16))
def test_no_bit_changes(case: Case, before: tuple[Pass, ...], schedule_seed: int) -> None:
    case = replace(case, blocks=case.blocks + 2)
    logical = case.logical()
    passes = (*before, *case.passes())
    batches = inputs(logical, case.world_size, case.micro_steps)
    expected = run(applied(logical, passes), batches)
    program = proved(logical, (*passes, ALL))
    for section in program.sections:
        if section.name in (MICRO_STEP, LAST_MICRO_STEP):
            assert copied(section, ops.ToHost), section.name
    result = run(program, batches, schedule_seed)
    assert_equal(result, expected, range(case.world_size), "offloaded")


@pytest.mark.slow
@pytest.mark.parametrize("late", [(COPY_OUT,), (COPY_IN,), (COMPUTE,), (COPY_IN, COPY_OUT)])
def test_a_slow_stream_changes_nothing(late: tuple[str, ...]) -> None:
    logical = mlp(blocks=4)
    batches = inputs(logical, 3, 1)
    passes = for_stage(3, 3, overlap_update=True)
    expected = run(applied(logical, passes), batches)
    program = applied(logical, (*passes, ALL))
    for seed in range(3):
        lockstep = Lockstep(program, schedule_seed=seed, late_streams=late)
        lockstep.initialise_flats(initial(program))
        for step, batch in enumerate(batches):
            losses = [float(result.loss) for result in lockstep.step(batch)]
            assert losses == list(expected.losses[step])
        state = lockstep.full_state()
        assert all(torch.equal(state[key], expected.state[key]) for key in expected.state)


CHOICES: tuple[tuple[str, dict[str, object]], ...] = (
    ("gpt2", {"stage": 3, "precision": "bf16"}),
    ("convnet", {"stage": 2, "micro_steps": 2}),
    ("gpt2", {"stage": 1, "recompute": "*", "precision": "fp16", "clip": 1.0}),
    ("traps", {"stage": 3, "mesh": "replicate=2,shard=2", "world_size": 4}),
    ("convnet", {"stage": 0, "select_saved": False}),
    ("vit", {"stage": 3, "prefetch": 2, "overlap_update": False, "world_size": 1}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "choices"), CHOICES, ids=str)
def test_a_model_trains_and_is_evaluated_as_without(name: str, choices: dict[str, object]) -> None:
    """Dropout, batch norm, attention: losses, evaluations and the whole state, running statistics included."""
    path = MODELS / f"{name}.py"
    options = make_options({"world_size": 3, **choices})
    logical = traced(path, **choices)
    *passes, save, plan = for_options(options)
    without = applied(logical, (*passes, save, plan))
    program = proved(logical, (*passes, ALL, save, plan))
    assert copied(program.section_by_name[LAST_MICRO_STEP], ops.ToDevice)
    if EVALUATE in without.section_by_name:
        sections = (program.section_by_name[EVALUATE], without.section_by_name[EVALUATE])
        assert sections[0].body == sections[1].body
    file = load_model_file(str(path))
    batches = [
        [varied(file.batch(), micro, rank) for micro in range(options.micro_steps.count)]
        for rank in range(options.world_size)
    ]
    expected = trained(without, file.model, batches, 0)
    for seed in range(2):
        assert trained(program, file.model, batches, seed) == expected


def trained(
    program: Program,
    model: Callable[[], torch.nn.Module],
    batches: list[list[Batch]],
    schedule_seed: int,
) -> list[bytes]:
    """The bits of the losses of two steps and of an evaluation, and of all that the ranks hold afterwards."""
    lockstep = Lockstep(program, schedule_seed=schedule_seed)
    lockstep.initialise(model, seed=0)
    tensors: list[torch.Tensor] = []
    for _ in range(2):
        tensors += [result.loss for result in lockstep.step(batches)]
    if EVALUATE in program.section_by_name:
        tensors += [e.loss for e in lockstep.evaluate([of_rank[0] for of_rank in batches])]
    for rank in range(program.mesh.world_size):
        buffers = lockstep.buffers(rank)
        tensors += [buffers[name] for name in sorted(buffers)]
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


# ------------------------------------------------------------------------------------------------------- the memory


def activations_live(section: Section, program: Program, *, is_worst: bool) -> list[int]:
    """The bytes of activations on the device at each of their allocs, in the text or in the worst order of streams."""
    masks = happens.before(section.body)
    live: dict[str, int] = {}
    ended: list[tuple[int, int]] = []
    counts = [0]
    for index, op in enumerate(section.body):
        if not isinstance(op, ops.Alloc | ops.Release):
            continue
        buffer = program.buffer_by_name[op.buffer]
        if buffer.role not in (Role.SAVED, Role.ACTIVATION) or buffer.space is not Space.DEVICE:
            continue
        if isinstance(op, ops.Release):
            ended.append((index, live.pop(op.buffer)))
            continue
        live[op.buffer] = buffer.size_bytes
        late = (size for end, size in ended if not masks[index] >> end & 1)
        counts.append(sum(live.values()) + (sum(late) if is_worst else 0))
    return counts


@examples(15)
@given(cases(world_sizes=(1, 2)))
def test_no_order_of_the_streams_holds_more_activations_than_the_text(case: Case) -> None:
    case = replace(case, blocks=case.blocks + 2)
    program = applied(case.logical(), (*case.passes(), ALL))
    assert AheadBound(kind=BoundKind.ACTIVATIONS, ahead=0) in program.bounds
    for section in program.sections:
        worst = activations_live(section, program, is_worst=True)
        assert worst == activations_live(section, program, is_worst=False)


def test_without_the_bound_the_device_may_hold_more() -> None:
    program = with_copies()
    unbounded = replace(
        program, bounds=tuple(b for b in program.bounds if b.kind is not BoundKind.ACTIVATIONS)
    )
    section = derive_waits(unbounded).section_by_name[LAST_MICRO_STEP]
    assert max(activations_live(section, program, is_worst=True)) > max(
        activations_live(section, program, is_worst=False)
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_the_device_holds_two_units_of_a_deep_model_and_the_host_the_others(stage: int) -> None:
    """Each block saves two values of one size, so a further block costs the host these and the device nothing."""
    passes = for_stage(stage, 2)

    def taken(blocks: int, *more: Pass) -> tuple[int, int]:
        program = applied(mlp(blocks=blocks, batch=512), (*passes, *more))
        host = footprint(program, space=Space.HOST)
        (section,) = (s for s in program.sections if s.name == LAST_MICRO_STEP)
        return max(activations_live(section, program, is_worst=True)), host.arena_bytes

    value_bytes = 512 * 8 * 4
    kept = [taken(blocks) for blocks in (6, 9)]
    offloaded = [taken(blocks, ALL) for blocks in (6, 9)]
    assert kept[1][0] - kept[0][0] == 3 * 2 * value_bytes
    assert offloaded[1][0] == offloaded[0][0] < kept[0][0]
    assert offloaded[1][1] - offloaded[0][1] == 3 * 2 * value_bytes
    # Each block but the last reads two.
    assert offloaded[0][1] == 5 * 2 * value_bytes


# -------------------------------------------------------------------------------------------------- what is offloaded


def test_a_value_leaves_beside_the_next_unit_and_is_back_a_unit_ahead() -> None:
    program = with_copies()
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    calls = {
        op.unit + op.segment[op.segment.index(".") :]: i
        for i, op in enumerate(body)
        if isinstance(op, ops.Compute)
    }
    copies = {
        (type(op), op.source.buffer): index
        for index, op in enumerate(body)
        if isinstance(op, ops.Transfer)
    }
    down, up = copies[ops.ToHost, "blocks.1.relu"], copies[ops.ToDevice, "blocks.1.relu.host"]
    assert masks[down] >> calls["blocks.1.forward"] & 1
    assert not masks[calls["blocks.2.forward"]] >> down & 1, "it may be under way"
    assert masks[calls["blocks.3.forward"]] >> down & 1, "it must be done"
    assert down < calls["blocks.2.forward"], "it is issued before"
    assert masks[up] >> calls["blocks.3.backward"] & 1
    assert calls["blocks.3.backward"] < up < calls["blocks.2.backward"]
    assert not masks[calls["blocks.2.backward"]] >> up & 1
    assert masks[calls["blocks.1.backward"]] >> up & 1


def test_what_is_needed_at_once_stays_and_so_does_everything_that_no_forward_saves() -> None:
    program = with_copies(blocks=4)
    section = program.section_by_name[LAST_MICRO_STEP]
    assert copied(section, ops.ToHost) == [
        *("h.0", "h.1", "blocks.0.relu", "h.2", "blocks.1.relu", "blocks.2.relu")
    ]
    assert sorted(copied(section, ops.ToDevice)) == sorted(
        f"{name}.host" for name in copied(section, ops.ToHost)
    )
    (update,) = (s for s in program.sections if s.name == "update")
    assert not any(isinstance(op, ops.Transfer) for op in update.body)
    small = applied(mlp(blocks=1), (*for_stage(0, 2), ALL))
    assert copied(small.section_by_name[LAST_MICRO_STEP], ops.ToHost) == []
    assert small.bounds == ()


def test_units_are_those_whose_backward_reads_a_value_first() -> None:
    logical = mlp(blocks=5)
    program = applied(logical, (OffloadActivations(units=("blocks.1",), smallest=0),))
    assert copied(program.section_by_name[LAST_MICRO_STEP], ops.ToHost) == ["h.1", "blocks.1.relu"]
    with pytest.raises(UserError, match=r"`offload-activations\{units=x, smallest=1\}` names"):
        applied(logical, (OffloadActivations(units=("x",), smallest=1),))


def test_small_values_stay() -> None:
    logical = mlp(blocks=4, batch=64)
    value_bytes = 64 * 8 * 4
    for smallest, count in ((value_bytes, 6), (value_bytes + 1, 0)):
        program = applied(logical, (OffloadActivations(smallest=smallest),))
        assert len(copied(program.section_by_name[LAST_MICRO_STEP], ops.ToHost)) == count
    assert OffloadActivations().spec() == "offload-activations{smallest=65536}"


def test_a_unit_that_is_called_twice_has_a_turn_for_each_call() -> None:
    logical = called_twice()
    batches = inputs(logical, 3, 1)
    program = proved(logical, (*for_stage(3, 3), ALL))
    assert copied(program.section_by_name[LAST_MICRO_STEP], ops.ToHost)
    expected = run(applied(logical, for_stage(3, 3)), batches)
    assert_equal(run(program, batches, 3), expected, range(3), "called twice")


def test_recomputation_reads_what_comes_back() -> None:
    logical = mlp(blocks=5)
    program = proved(logical, (Recompute(), *for_stage(3, 2), ALL))
    section = program.section_by_name[LAST_MICRO_STEP]
    assert copied(section, ops.ToHost) == ["h.0", "h.1", "h.2", "h.3"]
    readers = [
        op.segment
        for op in section.body
        if any(r.buffer == "h.1.again" for r in effects(op).reads) and isinstance(op, ops.Compute)
    ]
    assert readers[0].startswith("block.recompute")


def test_it_is_idempotent_and_leaves_its_input_alone() -> None:
    before = applied(mlp(blocks=4), for_stage(3, 2))
    text = print_program(before)
    program = ALL(before)
    assert print_program(before) == text
    assert ALL(program) == program
    assert parse(print_program(applied(mlp(blocks=4), (*for_stage(3, 2), ALL)))).buffers


# ------------------------------------------------------------------------------------------- as many bytes as asked


def needed_bytes(program: Program) -> int:
    return footprint(program).total_bytes


def offloaded_bytes(program: Program) -> int:
    return sum(
        b.size_bytes for b in program.buffers if b.space is Space.HOST and b.role is Role.SAVED
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_are_as_many_as_asked_and_no_value_more(stage: int) -> None:
    logical, passes = mlp(blocks=8, batch=2048), for_stage(stage, 2)
    before = applied(logical, passes)
    most = needed_bytes(before) - needed_bytes(applied(logical, (*passes, ALL)))
    value_bytes = 2048 * 8 * 4
    assert most >= 6 * value_bytes
    moved: list[int] = []
    for wanted in (0, 1, value_bytes, value_bytes + 1, most // 2, most):
        program = proved(logical, (*passes, OffloadActivations(bytes=wanted, smallest=0)))
        assert needed_bytes(before) - needed_bytes(program) >= wanted
        moved.append(offloaded_bytes(program))
        # No fewer can do, because a byte that stays frees nothing.
        assert wanted <= moved[-1] < wanted + 2 * value_bytes or wanted == most
    assert moved == sorted(moved)
    assert moved[0] == 0
    sentence = f"saves the device at most {most:,} bytes, and not {most + 1:,};"
    with pytest.raises(UserError, match=sentence):
        applied(logical, (*passes, OffloadActivations(bytes=most + 1, smallest=0)))


def test_what_is_away_longest_goes_first() -> None:
    logical = mlp(blocks=8, batch=2048)
    program = applied(logical, (OffloadActivations(bytes=2 * 2048 * 8 * 4, smallest=0),))
    names = set(copied(program.section_by_name[LAST_MICRO_STEP], ops.ToHost))
    assert names <= {"h.0", "h.1", "blocks.0.relu", "blocks.1.relu"}


@pytest.mark.parametrize("option", ["bytes", "smallest"])
def test_an_option_is_a_number_of_bytes(option: str) -> None:
    sentence = (
        f"The option `{option}` of `offload-activations` is a number of bytes, at least 0, not -1."
    )
    with pytest.raises(UserError, match=sentence):
        parse_spec(f"offload-activations{{{option}=-1}}")


# --------------------------------------------------------------------------------------------------------- the costs


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_run_beside_the_units_in_a_simulated_step(stage: int) -> None:
    """Where a unit computes for longer than its values travel, the step takes no longer than without."""
    logical, passes = mlp(blocks=5, batch=64), for_stage(stage, 2)
    rates = dict.fromkeys(
        ("to_device_bytes_per_s", "to_host_bytes_per_s", "both_bytes_per_s"), figure(1e7)
    )
    link = {"name": "up", "accelerators": figure(1), **rates, "latency_s": figure(1e-6)}
    slow = machine(flops_per_s=1e6, more={"host_link": link})
    program = applied(logical, (*passes, ALL))
    simulation = simulate(program, slow)
    assert simulation.step_ns == simulate(applied(logical, passes), slow).step_ns
    body = program.section_by_name[LAST_MICRO_STEP].body
    spans = [
        (body[span.index], span)
        for span in simulation.classes[0].spans
        if span.section == LAST_MICRO_STEP
    ]
    computing = [span for op, span in spans if isinstance(op, ops.Compute)]
    copying = [span for op, span in spans if isinstance(op, ops.Transfer)]
    assert len(copying) == 2 * len(copied(program.section_by_name[LAST_MICRO_STEP], ops.ToHost)) > 0
    for copy in copying:
        assert copy.end_ns > copy.start_ns
        assert any(c.start_ns <= copy.start_ns and copy.end_ns <= c.end_ns for c in computing)
