"""Training with an optimizer on the host, over several steps: checkpoints, learning rates, evaluations, averages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.passes.numbers import initial, inputs
from tests.runtime.support import require_same
from tests.support.evaluations import with_evaluation
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.runtime.execution.lockstep import Lockstep

RANKS = 3
OFFLOAD: tuple[Pass, ...] = (OffloadOptimizer(), OffloadGradients())


def program(stage: int, precision: str, *, is_offloaded: bool) -> Program:
    logical = mlp(precision=precision, micro_steps=2, clip=1.0, ema=0.9)
    further = OFFLOAD if is_offloaded else ()
    return applied(logical, (*for_stage(stage, RANKS), *further, SaveState(), PlanMemory()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "saving", "resuming"),
    [
        (0, "fp32", True, False),
        (1, "fp16", False, True),
        (2, "bf16", True, True),
        (3, "fp16", True, False),
        (3, "fp32", False, True),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, stage: int, precision: str, saving: bool, resuming: bool
) -> None:
    """With averages; ``test_offload_matrix.py`` has all that is offloaded beside."""
    plain = program(stage, precision, is_offloaded=False)
    batches = inputs(plain, RANKS, 2)
    expected = Lockstep(plain)
    expected.initialise_flats(initial(plain))
    for step in batches:
        expected.step(step)

    first = program(stage, precision, is_offloaded=saving)
    run = Lockstep(first, schedule_seed=1)
    run.initialise_flats(initial(first))
    run.step(batches[0])
    run.save(str(tmp_path / "saved"))
    second = Lockstep(program(stage, precision, is_offloaded=resuming), schedule_seed=2)
    second.load(str(tmp_path / "saved"))
    for step in batches[1:]:
        second.step(step)
    require_same(second.full_state(), expected.full_state())


def test_what_is_saved_beside_the_next_step_is_the_state_of_the_boundary() -> None:
    for late_streams in ((), ("optimizer",)):
        offloaded = program(3, "fp32", is_offloaded=True)
        batches = inputs(offloaded, RANKS, 2)
        run = Lockstep(offloaded, schedule_seed=3, late_streams=late_streams)
        run.initialise_flats(initial(offloaded))
        run.step(batches[0])
        saved = run.save_state()
        expected = [{n: t.clone() for n, t in run.buffers(r).items()} for r in range(RANKS)]
        run.step(batches[1])
        for of_rank, buffers in zip(saved, expected, strict=True):
            of_rank.wait()
            assert any(name.endswith(".param.host") for name in of_rank.tensors)
            for name, copy in of_rank.tensors.items():
                assert torch.equal(copy.tensor, buffers[name][copy.start : copy.stop]), name
            of_rank.release()


def test_a_new_learning_rate_counts_from_the_next_update() -> None:
    """The host reads a copy of it, which each update makes anew."""
    plain, offloaded = (
        program(2, "bf16", is_offloaded=is_offloaded) for is_offloaded in (False, True)
    )
    batches = inputs(plain, RANKS, 2)
    states = []
    for each in (plain, offloaded):
        run = Lockstep(each)
        run.initialise_flats(initial(each))
        run.step(batches[0])
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.step(batches[1])
        states.append(run.full_state())
    require_same(*states)


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluations_and_averages_between_steps_are_those_without_offload(stage: int) -> None:
    logical = with_evaluation(mlp(precision="bf16", ema=0.9, clip=1.0))
    batches = inputs(logical, RANKS, 1)
    losses, averages = [], []
    for further in ((), OFFLOAD):
        each = applied(logical, (*for_stage(stage, RANKS), *further, SaveState(), PlanMemory()))
        run = Lockstep(each, schedule_seed=4)
        run.initialise_flats(initial(each))
        for step in batches:
            run.step(step)
            losses.append([float(e.loss) for e in run.evaluate([own[0] for own in step])])
        averages.append(run.full_parameters(ema=True))
    assert losses[: len(batches)] == losses[len(batches) :]
    require_same(*averages)
