"""Copies of new parameters that run beside the next step: the same numbers, and no forward waits for more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import host_machine
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.support.edits import without_each
from tests.support.examples import examples
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.simulate import simulate
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.footprint import footprint
from zeroir.passes import manager
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.overlap_uploads import OverlapUploads


def offloaded(stage: int = 3, *, clip: float | None = 1.0, precision: str = "bf16") -> Program:
    """A program of four units whose host updates their parameters."""
    logical = mlp(blocks=2, dim=96, precision=precision, clip=clip)
    passes = for_stage(stage, 2, overlap_update=clip is None)
    return applied(logical, (*passes, OffloadOptimizer()))


@examples(6)
@given(cases(world_sizes=(1, 3)), st.integers(0, 2**16), st.booleans())
def test_no_bit_changes(case: Case, schedule_seed: int, has_gradients: bool) -> None:
    plain = applied(case.logical(), case.passes())
    gradients = [OffloadGradients()] if has_gradients else []
    passes = [OffloadOptimizer(), *gradients, OverlapUploads(), SaveState(), PlanMemory()]
    program = manager.run(plain, passes, reference=case.logical())
    assert_same(program, plain, case.micro_steps, [schedule_seed])


@pytest.mark.parametrize("stage", [0, 3])
def test_the_forward_of_a_unit_waits_for_its_own_parameters_alone(stage: int) -> None:
    program = manager.apply(OverlapUploads(), offloaded(stage))
    section = program.section_by_name[LAST_MICRO_STEP]
    crossing = {pending.event for pending in section.entry.pending}
    awaited: set[str] = set()
    awaited_before: dict[str | None, int] = {}
    for op in section.body:
        if isinstance(op, ops.Wait) and op.waited in crossing:
            awaited.add(op.waited)
        elif isinstance(op, ops.Compute):
            awaited_before.setdefault(op.unit, len(awaited))
    assert {event for event in crossing if event.startswith("to_device")} <= awaited
    # Gathers are one unit ahead.
    assert next(iter(awaited_before.values())) <= 2 < len(awaited_before)


def test_copies_outlive_their_step() -> None:
    before = offloaded()
    after = manager.apply(OverlapUploads(), before)
    machine = host_machine({"to_device": 1e6}, ranks=2)
    simulated = [simulate(program, machine) for program in (before, after)]
    ends_ns = [max(span.end_ns for span in s.classes[0].spans) for s in simulated]
    assert ends_ns[0] == simulated[0].step_ns
    assert ends_ns[1] > simulated[1].step_ns
    # Nothing else takes time here, so the next step waits for them where it would have waited before.
    copied_s = sum(b.size_bytes for b in before.buffers if b.name.endswith(".param")) / 1e6
    for simulation in simulated:
        assert simulation.step_s == pytest.approx(copied_s, rel=0.02)
        assert sum(item.duration_ns for item in simulation.critical_path) == simulation.step_ns


@pytest.mark.parametrize("stage", [1, 2])
def test_what_the_devices_gather_ends_with_the_step(stage: int) -> None:
    before = offloaded(stage)
    after = manager.apply(OverlapUploads(), before)
    assert (after.sections, after.buffers) == (before.sections, before.buffers)


def test_buffers_on_the_way_share_memory() -> None:
    before = offloaded()
    host_bytes = [
        footprint(manager.apply(PlanMemory(), program), space=Space.HOST).total_bytes
        for program in (before, manager.apply(OverlapUploads(), before))
    ]
    largest = max(b.size_bytes for b in before.buffers if b.name.endswith(".param.host"))
    assert host_bytes[0] <= host_bytes[1] <= host_bytes[0] + 2 * largest


def test_no_wait_can_be_left_out() -> None:
    program = manager.apply(OverlapUploads(), offloaded())

    def is_for_a_copy(op: Op) -> bool:
        return isinstance(op, ops.Wait) and op.waited.startswith("to_device.")

    mutants = list(without_each(program, is_for_a_copy))
    assert mutants
    for where, mutant in mutants:
        assert codes(mutant), where
    update = program.section_by_name[UPDATE].body
    assert any(isinstance(op, ops.ToDevice) and op.event for op in update)
