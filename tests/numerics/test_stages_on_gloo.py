"""Real processes compute, bit for bit, what the reference semantics say, at every ZeRO stage and with every option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.host_parameter_workers import STEPS as HOST_STEPS
from tests.numerics.paged_workers import LARGE, SMALL, STAGE, logical, scheduled
from tests.numerics.trainings import RANKS, TRAININGS, assert_ranks_compute_the_same
from tests.runtime.constructors import Mlp
from tests.runtime.support import (
    ROOT,
    Ranks,
    initial_flats,
    lowered,
    random_batches,
    require_run,
    require_same,
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
from tests.support.lowering import applied
from tests.support.offloads import OFFLOADS
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.frontend import trace
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.contents import FlatContent
from zeroir.ir.program import LAST_MICRO_STEP
from zeroir.ir.text import print_program
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.parametrize(
    ("world_size", "precisions", "backend"),
    [
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


def test_micro_steps_equal_lockstep_bit_for_bit(tmp_path: Path) -> None:
    """Stages 0 and 1 add over micro-steps first, 2 and 3 over ranks first: each equals its own reference."""
    precisions = ("fp32", "bf16")
    require_success(Ranks(3, tmp_path, "micro-steps", *precisions).wait())
    for precision, stage in product(precisions, range(4)):
        logical = mlp(precision=precision, clip=0.5, micro_steps=2, is_weighted=True)
        expected = run_lockstep(
            lowered(logical, stage, 3),
            initial=initial_flats(logical),
            inputs=micro_batches(3),
            weight=weight_of_values,
        )
        losses = [losses[0] for losses in expected.losses]
        require_run(tmp_path / f"{precision}.{stage}.safetensors", losses, expected.state)


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


KINDS: Mapping[str, tuple[Callable[[ops.Op], bool], ...]] = {
    "overlapped": (
        lambda op: isinstance(op, ops.Collective) and len(op.pairs) > 1,
        lambda op: isinstance(op, ops.OptimizerStep),
    ),
    "offloaded": (lambda op: isinstance(op, ops.Transfer),),
}
"""Ops that the last micro-step of trainings must have, by the name of the trainings."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "name", "more"),
    [
        *product(["gloo", "peer-memory"], ["overlapped", "offloaded_with_averages"], [()]),
        ("gloo", "offloaded", tuple(OFFLOADS)),
        ("peer-memory", "offloaded", ("everything",)),
        ("gloo", "unit_by_unit", ()),
        ("gloo", "paged", ()),
    ],
)
def test_trainings_equal_lockstep_without_all_that_bit_for_bit(
    tmp_path: Path, backend: str, name: str, more: tuple[str, ...]
) -> None:
    """Merged collectives, updates in the backward, buffers outside device memory, and micro-batches unit by unit."""
    for training in TRAININGS[name](*more):
        body = training.scheduled().section_by_name[LAST_MICRO_STEP].body
        for is_wanted in KINDS.get(name, ()):
            assert any(map(is_wanted, body)), training.name
    assert_ranks_compute_the_same(tmp_path, backend, name, *more)


def test_a_checkpoint_continues_in_other_pages_and_without(tmp_path: Path) -> None:
    program = scheduled(logical(), STAGE, RANKS, SMALL)
    assert any(isinstance(b.holds, FlatContent) and b.holds.stride for b in program.buffers)
    require_success(Ranks(RANKS, tmp_path, module="tests.numerics.paged_workers").wait())
    whole = load_file(tmp_path / "unpaged.whole.safetensors")
    for saver in ("paged", "unpaged"):
        for name in ("whole", "none", "small", "large"):
            require_same(load_file(tmp_path / f"{saver}.{name}.safetensors"), whole)
    _check_other_ranks(tmp_path)


def _check_other_ranks(folder: Path) -> None:
    """Another number of ranks, with other shards and other pages, has the same state."""
    states = []
    for saver in ("paged", "unpaged"):
        for ranks, paging in ((1, SMALL), (2, LARGE), (4, None)):
            lockstep = Lockstep(scheduled(logical(), 3, ranks, paging))
            lockstep.load(str(folder / saver))
            states.append(lockstep.full_state())
    for state in states[1:]:
        require_same(state, states[0])


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
        losses = [float(lockstep.step(step)[0].loss) for step in random_batches(HOST_STEPS, 3)]
        require_run(tmp_path / f"{stage}.safetensors", losses, lockstep.full_state())
