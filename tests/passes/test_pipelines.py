"""From a user's options to a scheduled program."""

from __future__ import annotations

import pytest

from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.passes.communication.bound_gradients import BoundGradients
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.pipelines import for_options, lower
from zeroir.verify import verify


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_the_one_below_and_more(stage: int) -> None:
    """But for the bound on full gradients, which comes last at every stage that has one."""
    below, passes = (
        [step for step in for_stage(max(s, 0), 4) if not isinstance(step, BoundGradients)]
        for s in (stage - 1, stage)
    )
    assert passes[: len(below)] == below
    assert isinstance(for_stage(stage, 4)[-1], BoundGradients) == (stage >= 2)


def test_options_choose_the_passes() -> None:
    given = {"elide": False, "bucket": 4096, "prefetch": 2, "live_gradients": 3}
    options = make_options({"stage": 3, "world_size": 6, **given})
    *chosen, saving, last = for_options(options)
    select = options.recompute.select_saved
    expected = for_stage(
        3, 6, elide=False, bucket=4096, distance=2, live=3, overlap_update=True, select=select
    )
    assert tuple(chosen) == expected
    assert (saving, last) == (SaveState(), PlanMemory())


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_lowering_is_for_the_world_size_and_says_so(world_size: int) -> None:
    options = make_options({"stage": 2, "world_size": world_size})
    logical = mlp()
    program = lower(logical, options)
    assert program.mesh.world_size == world_size
    assert program.passes == tuple(step.spec() for step in for_options(options))
    assert program.options is options
    assert verify(program, logical).findings == ()


def test_lowering_twice_gives_equal_programs() -> None:
    options = make_options({"stage": 3, "world_size": 4})
    assert lower(mlp(), options) == lower(mlp(), options)
