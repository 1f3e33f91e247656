"""The reference semantics: order that nothing demands does not matter, order that is missing shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.edits import at, is_of, places, put
from tests.support.evaluations import with_evaluation
from tests.support.examples import examples
from tests.support.lockstep import LockstepResult, run_lockstep
from tests.support.programs import mlp
from zeroir.errors import InternalError, UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Pending, Program, Section, State
from zeroir.ir.text import parse
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
    body = program.section_by_name[LAST_MICRO_STEP].body
    gathers = {op.event for op in body if isinstance(op, ops.AllGather | ops.Prefetch)}
    waits = places(program, lambda op: isinstance(op, ops.Wait) and op.waited in gathers)
    assert waits
    for missing in waits:
        assert any(_differs(put(program, missing), seed) for seed in range(12)), missing


def _differs(program: Program, schedule_seed: int) -> bool:
    try:
        return not is_equal(run(program, schedule_seed), EXPECTED)
    except InternalError:
        return True


def test_a_released_buffer_cannot_be_used() -> None:
    place = places(LOGICAL, is_of(ops.Release))[0]
    release = at(LOGICAL, place)
    assert isinstance(release, ops.Release)
    (allocated, *_) = places(
        LOGICAL, lambda op: op == ops.Alloc(buffer=release.buffer, stream="compute")
    )
    mutant = put(put(LOGICAL, place), allocated, at(LOGICAL, allocated), release)
    with pytest.raises(InternalError, match=rf"last_micro_step:\d+ compute .*%{release.buffer}"):
        run_lockstep(mutant, initial=INITIAL, inputs=random_batches(1, 1))


def test_fresh_memory_is_poisoned() -> None:
    mutant = put(LOGICAL, places(LOGICAL, is_of(ops.Compute))[0])
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


# Scalars on ``replicate=2, shard=2``: sum over one axis, gather over the other, broadcast.
COLLECTIVES_ON_A_MESH = parse("""zeroir 1
mesh replicate=2 shard=2
comm across axis=replicate
comm along axis=shard
streams compute:device gather:device reduce:device
report loss %total
report batch_loss %total
buffer %x : f32[2] device scalar = value x
buffer %total : f32[2] device scalar = value total
buffer %both : f32[4] device scalar = value both
buffer %root : f32[2] device scalar = value root
scalar %total = (0.0, 0.0)
section last_micro_step {
  0: !0 = all_reduce %x -> %total comm=across stream=reduce
  1: !1 = all_gather %x -> %both comm=along stream=gather
  2: wait !1 on=compute
  3: broadcast %x -> %root comm=along root=1 stream=compute
}
section update {
}
""")


@pytest.mark.parametrize("schedule_seed", range(4))
def test_collectives_stay_within_the_groups_of_their_axis(schedule_seed: int) -> None:
    lockstep = Lockstep(COLLECTIVES_ON_A_MESH, schedule_seed=schedule_seed)
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
    pending = State(pending=(Pending(event="1", stream="gather"),))
    both, root = (Region(buffer=name, offset=0, numel=2) for name in ("both", "root"))
    use = ops.Cast(source=both, destination=root, stream="compute")
    gather = Section(
        name=LAST_MICRO_STEP, body=COLLECTIVES_ON_A_MESH.sections[0].body[1:2], exit=pending
    )
    waiting = Section(name=UPDATE, entry=pending, body=(ops.Wait(waited="1", on="compute"), use))
    reading = Section(name=UPDATE, entry=pending, body=(use,), exit=pending)
    program, without_wait = (
        replace(COLLECTIVES_ON_A_MESH, sections=(gather, update)) for update in (waiting, reading)
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


# Each update gathers the parameters that the next step reads; before the first step nobody has.
GATHER_ACROSS_STEPS = parse("""zeroir 1
mesh dp=2
comm gather axis=dp
streams compute:device gather:device
report loss %loss
report batch_loss %loss
flat f : f32[256] unit=f trainable {
  w : [200] offset=0
}
buffer %param : f32[128] device param = param f @dp
buffer %full : f32[256] device gathered
buffer %loss : f32[1] device scalar = value loss
section last_micro_step {
  entry live %full
  entry %full = param f after !0
  entry pending !0 stream=gather
  0: wait !0 on=compute
  1: cast %full[0:1] -> %loss stream=compute
  2: release %full stream=compute
}
section update {
  0: !1 = scale %param by %loss stream=compute
  1: wait !1 on=gather
  2: alloc %full stream=gather
  3: !0 = prefetch %param -> %full comm=gather stream=gather
  exit live %full
  exit %full = param f after !0
  exit pending !0 stream=gather
}
""")


@pytest.mark.parametrize("schedule_seed", range(6))
def test_a_gather_may_cross_the_boundary_between_two_steps(schedule_seed: int) -> None:
    lockstep = Lockstep(GATHER_ACROSS_STEPS, schedule_seed=schedule_seed)
    lockstep.initialise_flats({"param": torch.full((200,), 3.0)})
    losses = [[float(one.loss) for one in lockstep.step([[{}], [{}]])] for _ in range(3)]
    assert losses == [[3.0, 3.0], [9.0, 9.0], [81.0, 81.0]]
