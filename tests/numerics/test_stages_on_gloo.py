"""Real processes compute, bit for bit, what the reference semantics say, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.support import (
    ROOT,
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_run,
    require_success,
)
from tests.runtime.workers_cases import (
    CASES,
    CODED,
    MODEL_STEPS,
    STEPS,
    micro_batches,
    model_options,
    varied,
    weight_of_values,
)
from tests.support.lockstep import run_lockstep
from tests.support.programs import mlp
from zeroir.frontend import trace
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.text import print_program
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.parametrize(
    ("world_size", "precisions", "backend"),
    [
        (2, "fp32", "gloo"),
        (3, "fp32,bf16,fp16,8-bit", "gloo"),
        (3, "fp32,bf16,fp16", "peer-memory"),
        (4, "fp32", "peer-memory"),
    ],
)
def test_all_stages_equal_lockstep_bit_for_bit(
    tmp_path: Path, world_size: int, precisions: str, backend: str
) -> None:
    require_success(Ranks(world_size, tmp_path, "stages", precisions, backend).wait())
    for name in precisions.split(","):
        precision, clip = CASES[name]
        logical = mlp(precision=precision, clip=clip, has_codes=name in CODED)
        expected = run_lockstep(
            lowered(logical, 0, world_size),
            initial=initial_flats(logical),
            inputs=random_batches(STEPS, world_size),
        )
        for stage in range(4):
            losses = [losses[0] for losses in expected.losses]
            require_run(tmp_path / f"{name}.{stage}.safetensors", losses, expected.state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_steps_equal_lockstep_bit_for_bit(tmp_path: Path, precision: str) -> None:
    """Stages 0 and 1 add over micro-steps first, 2 and 3 over ranks first: each equals its own reference."""
    require_success(Ranks(3, tmp_path, "micro-steps", precision).wait())
    logical = mlp(precision=precision, clip=0.5, micro_steps=2, is_weighted=True)
    for stage in range(4):
        expected = run_lockstep(
            lowered(logical, stage, 3),
            initial=initial_flats(logical),
            inputs=micro_batches(3),
            weight=weight_of_values,
        )
        losses = [losses[0] for losses in expected.losses]
        require_run(tmp_path / f"{stage}.safetensors", losses, expected.state)


def test_dropout_and_running_statistics_equal_lockstep(tmp_path: Path) -> None:
    """The model of traps: tied, frozen, unused and twice-called parts, batch norm and dropout."""
    path = str(ROOT / "tests" / "support" / "models" / "traps.py")
    model_file = load_model_file(path)
    logical = trace(model_file, model_options(3)).program
    program = tmp_path / "program.zir"
    program.write_text(print_program(logical))
    require_success(Ranks(3, tmp_path, "model-stages", path, str(program)).wait())
    lockstep = Lockstep(lowered(logical, 0, 3), seed=3)
    lockstep.initialise(model_file.model, 3)
    losses = []
    for step in range(MODEL_STEPS):
        batches = [[varied(model_file.batch(), step, rank)] for rank in range(3)]
        losses.append(float(lockstep.step(batches)[0].loss))
    for stage in range(4):
        require_run(tmp_path / f"{stage}.safetensors", losses, lockstep.full_state())
