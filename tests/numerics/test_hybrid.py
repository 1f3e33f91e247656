"""Hybrid sharding against the outside reference, and on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.support import (
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_run,
    require_success,
)
from tests.runtime.workers_cases import CASES, MODEL_STEPS
from tests.support.captures import ROOT
from tests.support.lockstep import run_lockstep
from tests.support.programs import mlp
from zeroir.api.checks.check import check_model
from zeroir.api.compiling import compile_model
from zeroir.api.model_of_program import load_model
from zeroir.config import make_options
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = pytest.mark.slow
MODEL = str(ROOT / "tests" / "support" / "models" / "two_blocks.py")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("replicate=2,shard=3", {"stage": 3}),
        ("replicate=3,shard=2", {"stage": 0}),
        ("replicate=2,shard=3", {"stage": 1, "precision": "bf16"}),
        ("replicate=3,shard=2", {"stage": 2, "precision": "fp16", "initial_loss_scale": 2.0**30}),
        ("replicate=3,shard=3", {"stage": 3, "precision": "bf16", "micro_steps": 3}),
        ("replicate=2,shard=3", {"stage": 1, "micro_steps": 3}),
        ("replicate=2,shard=2", {"stage": 3, "clip": 0.1}),
    ],
)
def test_it_equals_eager_replicas(mesh: str, options: dict[str, object]) -> None:
    """Bit for bit, at every precision; the fp16 case overflows and skips steps."""
    comparison = check_model(MODEL, make_options({"mesh": mesh, **options}), steps=4, seed=1)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0
    assert mesh in str(comparison)
    assert len({loss for losses in comparison.losses for loss in losses}) > 1


def test_the_order_of_sums_is_that_of_the_mesh() -> None:
    """Six ranks in one group, in two or in three add up the same numbers in other orders."""
    found = [
        check_model(MODEL, make_options({**mesh, "lr": 0.1}), steps=6, seed=1).losses[-1]
        for mesh in (
            {"world_size": 6},
            {"mesh": "replicate=2,shard=3"},
            {"mesh": "replicate=3,shard=2"},
        )
    ]
    assert len(set(found)) > 1
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-4)


def test_replicas_begin_and_stay_alike_and_know_the_mean_loss() -> None:
    compiled = compile_model(MODEL, mesh="replicate=2,shard=2", precision="bf16")
    program = compiled.program
    lockstep = Lockstep(program)
    lockstep.initialise(load_model(compiled.artifact, compiled.path).model, 3)

    def assert_alike() -> None:
        for rank, twin in zip(*program.mesh.groups("shard"), strict=True):
            ours, theirs = lockstep.buffers(rank), lockstep.buffers(twin)
            for flat in program.flats:
                for kind in ("param", "master", "exp_avg"):
                    name = f"{flat.name}.{kind}"
                    assert torch.equal(ours[name], theirs[name]), name
        lockstep.full_state()  # which compares what the ranks gather

    assert_alike()
    start = {name: value.clone() for name, value in lockstep.full_parameters().items()}
    batches = [[(torch.randn(4, 6),)] for _ in range(4)]
    results = lockstep.step(batches)
    assert_alike()
    assert all(not torch.equal(value, start[n]) for n, value in lockstep.full_parameters().items())
    mean = sum(float(result.loss) for result in results) / 4
    for result in results:
        assert result.mean_loss is not None
        assert float(result.mean_loss) == pytest.approx(mean)


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "name"), [(4, "fp32"), (4, "fp16"), (6, "bf16")])
def test_real_processes_equal_lockstep_bit_for_bit(
    tmp_path: Path, world_size: int, name: str
) -> None:
    require_success(Ranks(world_size, tmp_path, "hybrid", "2", name).wait(300))
    precision, clip = CASES[name]
    logical = mlp(precision=precision, clip=clip)
    expected = run_lockstep(
        lowered(logical, 3, world_size, replicas=2),
        initial=initial_flats(logical),
        inputs=random_batches(MODEL_STEPS, world_size),
    )
    for stage in (0, 3):
        losses = [losses[0] for losses in expected.losses]
        require_run(tmp_path / f"{stage}.safetensors", losses, expected.state)
