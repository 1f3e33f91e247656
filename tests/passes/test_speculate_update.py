"""Speculative updates on the host: what begins early, what waits, and the same bits whatever is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.passes import happens
from tests.runtime.support import initial_flats, random_batches
from tests.runtime.workers_cases import weight_of_values
from tests.support.groups import in_groups
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch

RANKS = 3
OFFLOAD: tuple[Pass, ...] = (OffloadOptimizer(), OffloadGradients())


def offloaded(logical: Program, stage: int = 3, *more: Pass) -> Program:
    return applied(logical, (*for_stage(stage, RANKS), *OFFLOAD, *more))


def test_an_update_begins_beside_the_backward_and_ends_behind_the_decision() -> None:
    logical = mlp(precision="bf16", clip=1.0)
    program = proved(logical, (*for_stage(3, RANKS), *OFFLOAD, SpeculateUpdate()))
    last, update = (program.section_by_name[name].body for name in (LAST_MICRO_STEP, UPDATE))
    steps = [i for i, op in enumerate(last) if isinstance(op, ops.SpeculativeStep)]
    backward = max(i for i, op in enumerate(last) if isinstance(op, ops.Compute))
    assert len(steps) == len(program.flats)
    # All but the flat whose gradient the last segment completes begin before it.
    assert sum(step < backward for step in steps) == len(steps) - 1
    assert not any(isinstance(op, ops.OptimizerStep) for op in program.ops())
    decided = next(i for i, op in enumerate(update) if isinstance(op, ops.Decide))
    assert all(decided < i for i, op in enumerate(update) if isinstance(op, ops.CommitStep))
    # No segment waits for the host.
    before = happens.before(last)
    computed = [before[line] for line, op in enumerate(last) if isinstance(op, ops.Compute)]
    assert not any(of_segment >> step & 1 for of_segment in computed for step in steps)


def test_it_takes_the_host_memory_of_what_it_keeps() -> None:
    program = offloaded(mlp(precision="bf16", clip=1.0), 3, SpeculateUpdate())
    updated_bytes = sum(
        buffer.size_bytes
        for buffer in program.buffers
        if buffer.space is Space.HOST
        and isinstance(buffer.holds, FlatContent)
        and buffer.holds.quantity != "grad"
    )
    live = [program.buffer_by_name[n] for n in program.section_by_name[UPDATE].entry.live]
    # Per element the old master weight and moments, 12 bytes, and the new 16-bit parameter.
    assert sum(buffer.size_bytes for buffer in live) == updated_bytes // 12 * (12 + 2)
    assert {buffer.space for buffer in live} == {Space.HOST}


@pytest.mark.parametrize(
    "logical",
    [mlp(), mlp(precision="fp16", has_codes=True, clip=1.0)],
    ids=["no decision", "8 bits"],
)
def test_what_waits_for_no_decision_and_states_of_8_bits_stay_as_they_are(logical: Program) -> None:
    program = offloaded(logical)
    assert manager.apply(SpeculateUpdate(), program).sections == program.sections


def test_an_update_on_the_device_is_not_speculative() -> None:
    logical = mlp(clip=1.0)
    program = applied(logical, for_stage(3, RANKS))
    assert manager.apply(SpeculateUpdate(), program).sections == program.sections


def test_groups_averages_and_weighted_batches_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four steps the first is clipped, and the second has no weight, so it is skipped."""
    monkeypatch.setattr("zeroir.runtime.optimizers.chunked_update.SPECULATED_CHUNK_NUMEL", 128)
    logical = in_groups(
        mlp(
            blocks=1,
            precision="bf16",
            clip=1.3,
            ema=0.9,
            is_weighted=True,
            keep_fp32=True,
            micro_steps=2,
        )
    )
    batches = random_batches(4, RANKS, 2)

    empty = [id(batch) for rank in batches[1] for batch in rank]

    def weight(batch: Batch) -> float:
        return 0.0 if id(batch) in empty else weight_of_values(batch)

    states: list[dict[tuple[str, str], Tensor]] = []
    redone: list[bool | None] = []
    for number, more in enumerate(((), (SpeculateUpdate(),))):
        lockstep = Lockstep(
            offloaded(logical, 2, *more, SaveState(), PlanMemory()),
            schedule_seed=number,
            weight=weight,
        )
        lockstep.initialise_flats(initial_flats(logical))
        for step in batches:
            is_redone = lockstep.step(step)[0].is_redone
            redone.append(None if is_redone is None else bool(is_redone))
        states.append(lockstep.full_state())
    assert redone == [*[None] * 4, True, True, False, False]
    assert states[0].keys() == states[1].keys()
    for key, expected in states[0].items():
        assert torch.equal(states[1][key], expected), key


def test_a_program_that_saves_already_is_refused() -> None:
    program = offloaded(mlp(clip=1.0), 3, SaveState())
    with pytest.raises(UserError, match="speculate-update"):
        manager.check_contracts(replace(program), [SpeculateUpdate()])
