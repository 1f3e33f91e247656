"""fp16: an overflow on any rank skips the step on every rank, and a skipped step leaves no trace but the loss scale."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.support import begun, lowered, random_batches
from tests.support.programs import mlp
from zeroir.runtime.execution.lockstep import Lockstep

WORLD_SIZE = 3


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("overflowing", [(), (1,), (0, 1, 2)])
def test_an_overflow_anywhere_skips_everywhere(stage: int, overflowing: tuple[int, ...]) -> None:
    logical = mlp(precision="fp16", clip=1.0)
    lockstep = begun(Lockstep(lowered(logical, stage, WORLD_SIZE), schedule_seed=stage))
    first, second, third = random_batches(3, WORLD_SIZE)
    lockstep.step(first)
    before = {key: value.clone() for key, value in lockstep.full_state().items()}
    for rank in overflowing:
        second[rank] = [{"x": torch.full((4, 6), 3e4)}]
    results = lockstep.step(second)
    after = lockstep.full_state()
    is_equal = all(torch.equal(before[key], after[key]) for key in before)
    scales = [lockstep.buffers(rank)["loss_scale"].tolist() for rank in range(WORLD_SIZE)]
    steps = [float(lockstep.buffers(rank)["step"]) for rank in range(WORLD_SIZE)]
    assert [bool(result.is_skipped) for result in results] == [bool(overflowing)] * WORLD_SIZE
    assert is_equal == bool(overflowing)
    assert steps == [1.0 if overflowing else 2.0] * WORLD_SIZE
    # The first overflow only spends the hysteresis of 2; the scale falls with the next.
    assert scales == [[1024.0, 0.0, 1.0] if overflowing else [1024.0, 2.0, 2.0]] * WORLD_SIZE
    if overflowing:
        lockstep.step(second)
        assert [float(lockstep.buffers(rank)["loss_scale"][0]) for rank in range(3)] == [512.0] * 3
    lockstep.step(third)
    assert all(torch.isfinite(value).all() for value in lockstep.full_state().values())


def test_a_skipped_step_is_as_if_it_had_not_been() -> None:
    logical = mlp(precision="fp16")
    program = lowered(logical, 3, WORLD_SIZE)
    first, bad, second = random_batches(3, WORLD_SIZE)
    bad[1] = [{"x": torch.full((4, 6), 3e4)}]
    states = []
    for batches in ([first, second], [bad, first, bad, second]):
        lockstep = begun(Lockstep(program))
        for rank in range(WORLD_SIZE):
            lockstep.buffers(rank)["loss_scale"].copy_(torch.tensor([64.0, 0.0, 9.0]))
        for batch in batches:
            lockstep.step(batch)
        states.append(lockstep.full_state())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
