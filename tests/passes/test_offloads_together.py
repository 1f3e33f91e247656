"""Whatever is moved out of the memory of the device, alone or together, changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied, proved
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.memory.footprint import footprint
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.overlap_update import OverlapUpdate


@pytest.mark.slow
@examples(12)
@given(
    case=cases(world_sizes=(1, 4)),
    offload=st.sampled_from(sorted(OFFLOADS)),
    overlaps_update=st.booleans(),
    schedule_seed=st.integers(0, 2**16),
)
def test_no_bit_changes(
    case: Case, offload: str, overlaps_update: bool, schedule_seed: int
) -> None:
    case = replace(case, blocks=case.blocks + 2)
    logical = case.logical()
    passes = (*case.passes(), *((OverlapUpdate(),) if overlaps_update else ()))
    program = proved(logical, (*passes, *OFFLOADS[offload], SaveState(), PlanMemory()))
    # Few states need no pages.
    assert offload == "pages" or any(isinstance(op, ops.Transfer) for op in program.step_ops())
    assert_same(program, applied(logical, passes), case.micro_steps, [schedule_seed])


@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_all_together_leave_less_on_the_device_than_each_alone(stage: int) -> None:
    logical, base = mlp(blocks=6, dim=16, precision="bf16"), for_stage(stage, 2)
    device_bytes = {
        offload: footprint(applied(logical, (*base, *steps))).total_bytes
        for offload, steps in {**OFFLOADS, "nothing": ()}.items()
    }
    for offload, steps in OFFLOADS.items():
        parts = ["nothing", *(o for o, alone in OFFLOADS.items() if set(alone) < set(steps))]
        least = min(device_bytes[part] for part in parts)
        # The disk relieves the host, not the device, and speculation takes no memory of the device.
        is_of_host = "disk" in offload or "speculative" in offload
        assert device_bytes[offload] < least or (is_of_host and device_bytes[offload] == least), (
            offload
        )


@pytest.mark.parametrize("stage", [1, 2])
def test_one_gather_brings_parameters_that_host_and_device_have_updated(stage: int) -> None:
    """The device's changes are in their staging long before the host's are at home."""
    logical = mlp(blocks=2, precision="bf16", micro_steps=2)
    base = for_stage(stage, 3, bucket=100_000, overlap_update=True)
    passes = (*base, OffloadOptimizer(fraction=0.5), OffloadParameters())
    assert_same(proved(logical, passes), applied(logical, base), 2)
