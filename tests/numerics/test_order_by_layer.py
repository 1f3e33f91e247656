"""Micro-batches that run unit by unit compute what they do one behind the other, to the bit, and move less.

A whole step unit by unit adds up gradients on each rank, so it equals the run with ``accumulate_locally``; groups equal
the run without groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.numerics.test_accumulation import Steps, Trained, drawn, train
from tests.runtime.support import begun, random_batches, require_same
from tests.runtime.workers_cases import weight_of_values
from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir.analysis.traffic import collective_bytes, transfer_bytes
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program
from zeroir.passes.base import Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep

GROUPS = OrderByLayer(micro_batches=2)
LOGICAL = {
    "fp32": mlp(micro_steps=4),
    "bf16, clipped": mlp(micro_steps=4, precision="bf16", clip=1.0),
    "fp16, weighted": mlp(micro_steps=4, precision="fp16", is_weighted=True),
}


def whole(micro_steps: int = 4) -> OrderByLayer:
    return OrderByLayer(micro_batches=micro_steps, whole_step=True)


def scheduled(
    logical: Program,
    stage: int,
    ranks: int,
    order: OrderByLayer | None = None,
    offload: Sequence[Pass] = (),
    *,
    accumulate_locally: bool = False,
) -> Program:
    passes = for_stage(
        stage, ranks, order=order, overlap_update=True, accumulate_locally=accumulate_locally
    )
    return applied(logical, (*passes, *offload))


def batches(ranks: int) -> Steps:
    """Three steps of four micro-batches; the last one of the second step overflows in FP16."""
    steps = drawn(ranks, (4, 4, 4))
    steps[1][-1][-1] = {"x": torch.full((4, 6), 3e4)}
    return steps


def trained(program: Program, schedule_seed: int = 0) -> Trained:
    weight = None if program.weight is None else weight_of_values
    steps = batches(program.mesh.world_size)
    return train(program, steps, weight=weight, schedule_seed=schedule_seed)


def assert_no_bit_changes(name: str, stage: int, ranks: int, offload: Sequence[Pass] = ()) -> None:
    logical, is_local = LOGICAL[name], stage >= 2
    base = trained(scheduled(logical, stage, ranks, accumulate_locally=is_local))
    layer = scheduled(logical, stage, ranks, whole(), offload)
    trained(layer, schedule_seed=stage).assert_equals(base)
    groups = scheduled(logical, stage, ranks, GROUPS, offload, accumulate_locally=is_local)
    trained(groups, schedule_seed=ranks).assert_equals(base)
    if is_local:
        base = trained(scheduled(logical, stage, ranks))
        groups = scheduled(logical, stage, ranks, GROUPS, offload)
        trained(groups, schedule_seed=ranks).assert_equals(base)


def test_the_order_changes_no_bit() -> None:
    logical, offload = LOGICAL["fp16, weighted"], OFFLOADS["parameters"]
    base = trained(scheduled(logical, 3, 2, accumulate_locally=True))
    layer = scheduled(logical, 3, 2, whole(), offload)
    trained(layer, schedule_seed=1).assert_equals(base)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "ranks", "offload"),
    [
        ("fp32", 0, 1, "everything"),
        ("fp32", 3, 4, None),
        ("bf16, clipped", 1, 3, "everything"),
        ("bf16, clipped", 2, 2, "gradients"),
        ("fp16, weighted", 0, 3, "parameters"),
        ("fp16, weighted", 2, 3, "activations"),
        ("fp16, weighted", 3, 2, "everything"),
    ],
)
def test_the_order_changes_no_bit_anywhere(
    name: str, stage: int, ranks: int, offload: str | None
) -> None:
    assert_no_bit_changes(name, stage, ranks, () if offload is None else OFFLOADS[offload])


def step_bytes(program: Program) -> dict[str, int]:
    """The bytes of a step of four micro-batches that a rank gathers, reduces and copies to its device."""
    repeats = 4 // program.interleaved - 1 if MICRO_STEP in program.section_by_name else 0
    counted = {"all_gather": 0, "reduce_scatter": 0, "to_device": 0}
    for sections, times in (((LAST_MICRO_STEP, UPDATE), 1), ((MICRO_STEP,), repeats)):
        sizes = {
            **collective_bytes(program, sections=sections),
            **transfer_bytes(program, sections=sections),
        }
        for key in counted:
            counted[key] += times * sizes[key]
    return counted


def test_parameters_travel_once_for_all_micro_batches_of_a_group() -> None:
    """They do at stage 3, from host memory to the device and between ranks; gradients do in a whole step."""
    logical, offload = LOGICAL["fp32"], (OffloadParameters(),)
    step = step_bytes(scheduled(logical, 3, 2, None, offload))
    groups = step_bytes(scheduled(logical, 3, 2, GROUPS, offload))
    layer = step_bytes(scheduled(logical, 3, 2, whole(), offload))
    once = step_bytes(scheduled(mlp(), 3, 2, None, offload))
    # What the update brings up of parameters beside forward and backward does not depend on the order.
    update = 4 * once["to_device"] - step["to_device"]
    assert step["all_gather"] == 2 * groups["all_gather"] == 4 * layer["all_gather"]
    assert layer["all_gather"] == once["all_gather"]
    assert (step["to_device"], layer["to_device"]) == (
        4 * once["to_device"] - update,
        once["to_device"],
    )
    assert step["reduce_scatter"] == groups["reduce_scatter"] == 4 * layer["reduce_scatter"]


@pytest.mark.slow
def test_a_real_model_equals_eager_torch() -> None:
    """Dropout, running statistics, a tied weight, outputs, evaluations in between."""
    options = make_options(
        {"stage": 3, "world_size": 2, "micro_steps": 2, "order": "layer", "precision": "bf16"}
        | {"offload": "parameters,optimizer,gradients"}
    )
    comparison = check_model("tests/support/models/traps.py", options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)


def opened(program: Program) -> Engine:
    return begun(Engine(program))


def test_an_engine_collects_the_micro_batches_of_a_group(tmp_path: Path) -> None:
    program = scheduled(LOGICAL["fp32"], 2, 1, GROUPS)
    engine, other = opened(program), opened(program)
    ((own,),) = random_batches(1, 1, 4)
    with pytest.raises(UserError, match="groups of 2; give a step a multiple of 2, and not 3"):
        engine.step(own[:3])
    expected = engine.step(own)
    first = other.micro_step(own[0], is_last=False)
    with pytest.raises(UserError, match="a group has begun: save after a whole group"):
        other.save(tmp_path / "within")
    with pytest.raises(UserError, match="runs with a later call"):
        _ = first.loss
    second = other.micro_step(own[1], is_last=False)
    assert first.loss != second.loss
    other.save(tmp_path / "between")
    resumed = opened(program)
    assert resumed.load(tmp_path / "between").micro_steps == 2
    for running in (other, resumed):
        running.micro_step(own[2])
        with pytest.raises(UserError, match="groups of 2; give a step a multiple of 2, and not 3"):
            running.update()
        running.micro_step(own[3])
        assert running.update().loss == expected.loss
        require_same(running.full_state(), engine.full_state())


def test_a_program_for_whole_steps_takes_no_other_number() -> None:
    engine = opened(scheduled(LOGICAL["fp32"], 0, 1, whole()))
    ((own,),) = random_batches(1, 1, 8)
    for count in (1, 3, 8):
        with pytest.raises(UserError, match=f"all 4 micro-batches .* got {count}: give a step 4"):
            engine.step(own[:count])
    assert engine.step(own[:4]).weight == 4


@pytest.mark.slow
@pytest.mark.parametrize("order", [GROUPS, whole()])
def test_training_goes_on_from_a_checkpoint_of_the_other_order(
    tmp_path: Path, order: OrderByLayer
) -> None:
    logical, steps = LOGICAL["bf16, clipped"], batches(3)
    plain, layer = (
        scheduled(logical, 3, 3, each, OFFLOADS["everything"], accumulate_locally=True)
        for each in (None, order)
    )
    expected = trained(plain)
    for first, second in ((plain, layer), (layer, plain)):
        lockstep = begun(Lockstep(first))
        lockstep.step(steps[0])
        lockstep.step(steps[1])
        path = str(tmp_path / f"{first.interleaved}")
        lockstep.save(path)
        other = Lockstep(second)
        other.load(path)
        other.step(steps[2])
        require_same(other.full_state(), expected.state)
