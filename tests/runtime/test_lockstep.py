"""The reference semantics: order that nothing demands does not matter, order that is missing shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.edits import losses_in
from tests.support.evaluations import with_evaluation
from tests.support.examples import examples
from tests.support.lockstep import LockstepResult, run_lockstep
from tests.support.programs import mlp
from zeroir.errors import InternalError, UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import Content, FlatContent, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Communicator, Mesh
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    UPDATE,
    Flat,
    Holding,
    Pending,
    Program,
    ScalarBinding,
    Section,
    Slot,
    State,
)
from zeroir.runtime.execution.lockstep import Lockstep

WORLD_SIZE = 3
LOGICAL = mlp()
INITIAL = initial_flats(LOGICAL)
BATCHES = random_batches(3, WORLD_SIZE)
PROGRAMS = [lowered(LOGICAL, stage, WORLD_SIZE) for stage in range(4)]


def run(program: Program, schedule_seed: int = 0) -> LockstepResult:
    return run_lockstep(program, initial=INITIAL, inputs=BATCHES, schedule_seed=schedule_seed)


def is_equal(a: LockstepResult, b: LockstepResult) -> bool:
    return a.losses == b.losses and all(torch.equal(a.state[key], b.state[key]) for key in b.state)


EXPECTED = run(PROGRAMS[0])


@examples(12)
@given(stage=st.integers(0, 3), schedule_seed=st.integers(0, 2**32))
def test_every_stage_and_every_schedule_gives_the_same_bits(stage: int, schedule_seed: int) -> None:
    assert is_equal(run(PROGRAMS[stage], schedule_seed), EXPECTED)


@pytest.mark.slow
def test_a_missing_wait_shows() -> None:
    program = PROGRAMS[3]
    section = program.section_by_name[LAST_MICRO_STEP]
    gathers = {op.event for op in section.body if isinstance(op, ops.AllGather | ops.Prefetch)}
    waits = [op for op in section.body if isinstance(op, ops.Wait) and op.waited in gathers]
    assert waits
    for missing in waits:
        body = tuple(op for op in section.body if op is not missing)
        mutant = replace(
            program,
            sections=tuple(
                replace(one, body=body) if one is section else one for one in program.sections
            ),
        )
        assert any(_differs(mutant, seed) for seed in range(12)), missing


def _differs(program: Program, schedule_seed: int) -> bool:
    try:
        return not is_equal(run(program, schedule_seed), EXPECTED)
    except InternalError:
        return True


def test_a_released_buffer_cannot_be_used() -> None:
    section = LOGICAL.section_by_name[LAST_MICRO_STEP]
    first = next(op for op in section.body if isinstance(op, ops.Release))
    early = [op for op in section.body if op is not first]
    at = next(
        i for i, op in enumerate(early) if isinstance(op, ops.Alloc) and op.buffer == first.buffer
    )
    early.insert(at + 1, first)
    mutant = replace(
        LOGICAL,
        sections=tuple(
            replace(one, body=tuple(early)) if one is section else one for one in LOGICAL.sections
        ),
    )
    with pytest.raises(InternalError, match=rf"last_micro_step:\d+ compute .*%{first.buffer}"):
        run_lockstep(mutant, initial=INITIAL, inputs=random_batches(1, 1))


def test_fresh_memory_is_poisoned() -> None:
    section = LOGICAL.section_by_name[LAST_MICRO_STEP]
    write = next(op for op in section.body if isinstance(op, ops.Compute))
    mutant = replace(
        LOGICAL,
        sections=tuple(
            replace(one, body=tuple(op for op in one.body if op is not write))
            for one in LOGICAL.sections
        ),
    )
    result = run_lockstep(mutant, initial=INITIAL, inputs=random_batches(1, 1))
    assert result.losses[0][0] != result.losses[0][0]  # NaN


def test_micro_steps_agree_within_the_stages_that_add_in_one_order() -> None:
    """With k > 1 stages 0 and 1 add over micro-steps first, stages 2 and 3 over ranks first."""
    logical = mlp(micro_steps=3, precision="bf16")
    batches = random_batches(3, WORLD_SIZE, micro_steps=3)
    results = [
        run_lockstep(
            lowered(logical, stage, WORLD_SIZE),
            initial=initial_flats(logical),
            inputs=batches,
            schedule_seed=stage,
        )
        for stage in range(4)
    ]
    assert is_equal(results[0], results[1])
    assert is_equal(results[2], results[3])
    for key, value in results[0].state.items():
        torch.testing.assert_close(value, results[2].state[key], rtol=2e-2, atol=2e-3)


def _collectives_on_a_mesh() -> Program:
    """Scalars on ``replicate=2, shard=2``: sum over one axis, gather over the other, broadcast."""

    def scalar(name: str, numel: int) -> Buffer:
        return Buffer(
            name=name,
            dtype=DType.F32,
            numel=numel,
            space=Space.DEVICE,
            role=Role.SCALAR,
            holds=NamedContent(name=name),
        )

    def all_of(name: str, numel: int) -> Region:
        return Region(buffer=name, offset=0, numel=numel)

    def pair(source: Region, destination: Region) -> tuple[ops.Pair, ...]:
        return (ops.Pair(source=source, destination=destination),)

    x, total, both, root = all_of("x", 2), all_of("total", 2), all_of("both", 4), all_of("root", 2)
    body: tuple[ops.Op, ...] = (
        ops.AllReduce(pairs=pair(x, total), comm="across", stream="reduce", event="0"),
        ops.AllGather(pairs=pair(x, both), comm="along", stream="gather", event="1"),
        ops.Wait(waited="1", on="compute"),
        ops.Broadcast(pairs=pair(x, root), comm="along", root=1, stream="compute"),
    )
    return Program(
        mesh=Mesh(axes=(Axis(name="replicate", size=2), Axis(name="shard", size=2))),
        comms=(
            Communicator(name="across", axis="replicate"),
            Communicator(name="along", axis="shard"),
        ),
        buffers=(scalar("x", 2), scalar("total", 2), scalar("both", 4), scalar("root", 2)),
        sections=(Section(name=LAST_MICRO_STEP, body=body), Section(name=UPDATE, body=())),
        scalars=(ScalarBinding(buffer="total", values=(0.0, 0.0)),),
        reports=losses_in("total"),
    )


@pytest.mark.parametrize("schedule_seed", range(4))
def test_collectives_stay_within_the_groups_of_their_axis(schedule_seed: int) -> None:
    lockstep = Lockstep(_collectives_on_a_mesh(), schedule_seed=schedule_seed)
    for rank in range(4):
        lockstep.buffers(rank)["x"].copy_(torch.tensor([rank, 10.0 * rank]))
    lockstep.step([[{}] for _ in range(4)])
    for rank in range(4):
        buffers = lockstep.buffers(rank)
        shard, replicate = rank % 2, rank // 2
        assert buffers["total"].tolist() == [2.0 * shard + 2, 10 * (2.0 * shard + 2)]
        a, b = 2.0 * replicate, 2.0 * replicate + 1
        assert buffers["both"].tolist() == [a, 10 * a, b, 10 * b]
        assert buffers["root"].tolist() == [b, 10 * b]


def test_an_event_may_cross_a_boundary() -> None:
    """The last micro-step begins a gather whose destination only the update may read."""
    mesh = _collectives_on_a_mesh()
    gather = next(op for op in mesh.sections[0].body if isinstance(op, ops.AllGather))
    both, root = (Region(buffer=name, offset=0, numel=2) for name in ("both", "root"))
    pending = State(pending=(Pending(event="1", stream="gather"),))
    use = ops.Cast(source=both, destination=root, stream="compute")
    program = replace(
        mesh,
        sections=(
            Section(name=LAST_MICRO_STEP, body=(gather,), exit=pending),
            Section(name=UPDATE, entry=pending, body=(ops.Wait(waited="1", on="compute"), use)),
        ),
    )
    without_wait = replace(
        program,
        sections=(
            program.sections[0],
            Section(name=UPDATE, entry=pending, body=(use,), exit=pending),
        ),
    )

    def found(one: Program, schedule_seed: int) -> list[float]:
        lockstep = Lockstep(one, schedule_seed=schedule_seed)
        for rank in range(4):
            lockstep.buffers(rank)["x"].fill_(rank + 1.0)
        lockstep.step([[{}] for _ in range(4)])
        return [float(lockstep.buffers(rank)["root"][0]) for rank in range(4)]

    assert all(found(program, seed) == [1, 1, 3, 3] for seed in range(12))
    assert any(found(without_wait, seed) != [1, 1, 3, 3] for seed in range(12))


def test_evaluation_gives_the_loss_and_changes_nothing() -> None:
    lockstep = Lockstep(with_evaluation(LOGICAL))
    lockstep.initialise_flats(INITIAL)
    ((batch,),) = random_batches(1, 1)[0]
    before = lockstep.full_state()
    (first,) = lockstep.evaluate([batch])
    (again,) = lockstep.evaluate([batch])
    after = lockstep.full_state()
    assert all(torch.equal(before[key], after[key]) for key in before)
    (result,) = lockstep.step([[batch]])
    assert float(first.loss) == float(again.loss) == float(result.loss)
    with pytest.raises(UserError, match="made without a section `evaluate`"):
        Lockstep(LOGICAL).evaluate([batch])


def _gather_across_steps() -> Program:
    """Each update gathers the parameters that the next step reads; before the first step nobody has."""
    full = Region(buffer="full", offset=0, numel=256)
    shard = Region(buffer="param", offset=0, numel=128)
    first = Region(buffer="full", offset=0, numel=1)
    content = FlatContent(quantity="param", flat="f")
    at_boundary = State(
        live=("full",),
        holdings=(Holding(region=full, content=content, after="0"),),
        pending=(Pending(event="0", stream="gather"),),
    )
    loss = Region(buffer="loss", offset=0, numel=1)

    def buffer(name: str, numel: int, role: Role, holds: Content | None) -> Buffer:
        return Buffer(
            name=name, dtype=DType.F32, numel=numel, space=Space.DEVICE, role=role, holds=holds
        )

    return Program(
        mesh=Mesh(axes=(Axis(name="dp", size=2),)),
        comms=(Communicator(name="gather", axis="dp"),),
        flats=(
            Flat(
                name="f",
                unit="f",
                dtype=DType.F32,
                is_trainable=True,
                padded_numel=256,
                slots=(Slot(name="w", offset=0, shape=(200,)),),
            ),
        ),
        buffers=(
            buffer("param", 128, Role.PARAM, replace(content, shard="dp")),
            buffer("full", 256, Role.GATHERED, None),
            buffer("loss", 1, Role.SCALAR, NamedContent(name="loss")),
        ),
        sections=(
            Section(
                name=LAST_MICRO_STEP,
                entry=at_boundary,
                body=(
                    ops.Wait(waited="0", on="compute"),
                    ops.Cast(source=first, destination=loss, stream="compute"),
                    ops.Release(buffer="full", stream="compute"),
                ),
            ),
            Section(
                name=UPDATE,
                body=(
                    ops.Scale(region=shard, by=loss, stream="compute", event="1"),
                    ops.Wait(waited="1", on="gather"),
                    ops.Alloc(buffer="full", stream="gather"),
                    ops.Prefetch(
                        pairs=(ops.Pair(source=shard, destination=full),),
                        comm="gather",
                        stream="gather",
                        event="0",
                    ),
                ),
                exit=at_boundary,
            ),
        ),
        reports=losses_in("loss"),
    )


@pytest.mark.parametrize("schedule_seed", range(6))
def test_a_gather_may_cross_the_boundary_between_two_steps(schedule_seed: int) -> None:
    lockstep = Lockstep(_gather_across_steps(), schedule_seed=schedule_seed)
    lockstep.initialise_flats({"param": torch.full((200,), 3.0)})
    losses = [[float(one.loss) for one in lockstep.step([[{}], [{}]])] for _ in range(3)]
    assert losses == [[3.0, 3.0], [9.0, 9.0], [81.0, 81.0]]
