"""Real processes with parameters in host memory compute, bit for bit, what those without do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.constructors import Mlp
from tests.runtime.support import Ranks, random_batches, require_run, require_success
from tests.runtime.workers_cases import CASES
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.passes.base import Pass
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.runtime.execution.lockstep import Lockstep

STEPS = 6


def passes(stage: int, world_size: int) -> tuple[Pass, ...]:
    """The passes of a stage, with parameters at home in host memory."""
    return (*for_stage(stage, world_size), OffloadParameters(), SaveState(), PlanMemory())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "backend"), [("fp32", "gloo"), ("bf16", "peer-memory"), ("fp16", "gloo")]
)
def test_every_stage_equals_a_run_on_the_device(tmp_path: Path, name: str, backend: str) -> None:
    """Three ranks, saved and resumed in between; their parameters can be gathered after each step."""
    ranks = Ranks(3, tmp_path, name, backend, module="tests.numerics.host_parameter_workers")
    require_success(ranks.wait())
    precision, clip = CASES[name]
    logical = mlp(precision=precision, clip=clip)
    for stage in range(4):
        lockstep = Lockstep(applied(logical, for_stage(stage, 3)))
        torch.manual_seed(0)
        lockstep.initialise(Mlp, 0)
        losses = [float(lockstep.step(step)[0].loss) for step in random_batches(STEPS, 3)]
        require_run(tmp_path / f"{stage}.safetensors", losses, lockstep.full_state())
