"""Lion, Muon and Adafactor against torch.optim (Lion: its paper) on eager replicas, bit for bit, at every stage."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.memory.judge import judge
from tests.support.captures import ROOT
from tests.support.covering import covering
from zeroir.api.checks.check import check_model
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.cost.update_flops import update_flops
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify

MODEL = str(ROOT / "tests" / "support" / "models" / "odd_shapes.py")

CHOICES: dict[str, dict[str, object]] = {
    "lion": {"optimizer": "lion", "lr": 1e-3, "weight_decay": 0.1, "beta1": 0.95},
    "muon": {"optimizer": "muon", "lr": 0.02},
    "muon, otherwise": {
        "optimizer": "muon",
        "lr": 0.02,
        "nesterov": False,
        "momentum": 0.8,
        "ns_steps": 3,
        "ns_coefficients": "3.0,-3.2,1.2",
        "eps": 1e-3,
        "adjust_lr_fn": "match_rms_adamw",
        "no_decay": True,
    },
    "muon in groups": {
        "optimizer": "muon",
        "group": (
            "tall:lr=0.5,momentum=0.5",
            "blocks.1:lr=0.1,nesterov=false",
            "wide:optimizer=lion",
        ),
    },
    "shampoo": {"optimizer": "shampoo", "lr": 0.1},
    "shampoo, otherwise": {
        "optimizer": "shampoo",
        "lr": 0.1,
        "eps": 0.01,
        "weight_decay": 0.2,
        "group": ("tall:lr=0.5,eps=1e-3", "wide:optimizer=muon"),
    },
    "adafactor": {"optimizer": "adafactor", "lr": 0.05},
    "adafactor, otherwise": {
        "optimizer": "adafactor",
        "lr": 0.5,
        "weight_decay": 0.1,
        "beta2_decay": -0.5,
        "eps": 1e-4,
        "eps2": 0.02,
        "d": 1.5,
        "group": ("blocks.0:lr=0.01", "conv.bias:optimizer=muon"),
    },
}


OPTIONS: tuple[dict[str, object], ...] = (
    {"stage": 0, "world_size": 1},
    {"stage": 0, "world_size": 3},
    {"stage": 1, "world_size": 3},
    {"stage": 1, "world_size": 3, "precision": "fp16", "initial_loss_scale": 2.0**30},
    {"stage": 1, "world_size": 4, "precision": "bf16"},
    {"stage": 1, "mesh": "replicate=2,shard=2"},
    {"stage": 2, "world_size": 3, "precision": "bf16", "micro_steps": 2},
    {"stage": 2, "world_size": 4, "overlap_update": False, "ema": 0.9},
    {"stage": 3, "world_size": 1},
    {"stage": 3, "world_size": 3},
    {"stage": 3, "world_size": 3, "overlap_update": False, "precision": "bf16"},
    {"stage": 3, "world_size": 3, "precision": "fp16", "initial_loss_scale": 2.0**30},
    {"stage": 3, "mesh": "replicate=2,shard=2", "precision": "bf16"},
    {"stage": 3, "world_size": 3, "bucket": 100_000},
)
_FACTORS = sorted({key for options in OPTIONS for key in options})


def _factors(case: tuple[str, int]) -> tuple[object, ...]:
    """The optimizer, and each option by itself."""
    choice, number = case
    return choice, *(OPTIONS[number].get(key) for key in _FACTORS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "options"),
    [
        pytest.param(
            choice, OPTIONS[number], id="-".join(map(str, (choice, *OPTIONS[number].values())))
        )
        for choice, number in covering(product(CHOICES, range(len(OPTIONS))), _factors)
    ],
)
def test_it_equals_torch(choice: str, options: dict[str, object]) -> None:
    """Any optimizer with any value of any option."""
    comparison = check_model(MODEL, make_options({**CHOICES[choice], **options}), steps=4, seed=1)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0


@pytest.mark.slow
def test_each_setting_counts() -> None:
    """Otherwise the comparison above would hold for settings that nobody applies."""
    losses = {
        choice: check_model(
            MODEL, make_options({"world_size": 1, "evaluate": False, **values}), steps=2, seed=1
        ).losses[-1]
        for choice, values in CHOICES.items()
    }
    assert len(set(losses.values())) == len(CHOICES)


def compiled(optimizer: str, **options: object) -> Program:
    return compile_with(MODEL, make_options({"optimizer": optimizer, **options})).program


@pytest.mark.slow
def test_muon_leaves_what_is_no_matrix_to_adamw() -> None:
    program = compiled("muon", world_size=2, no_decay=True)
    groups = {group.name: group.algorithm for group in program.groups}
    assert groups == {
        "default": Algorithm.MUON,
        "adamw": Algorithm.ADAMW,
        "adamw.no_decay": Algorithm.ADAMW,
    }
    of_muon = {name for g in program.groups if g.name == "default" for name, *_ in g.intervals}
    shapes = {slot.shape for flat in program.flats if flat.name in of_muon for slot in flat.slots}
    assert shapes == {(35, 35), (51, 35), (3, 51)}


@pytest.mark.slow
def test_directions_are_gathered_in_bf16_and_states_are_shards() -> None:
    whole = compiled("muon", stage=0, world_size=2)
    program = compiled("muon", stage=3, world_size=2)
    buffers = program.buffer_by_name
    steps = [op for op in program.ops() if isinstance(op, ops.Direction)]
    assert len(steps) == 3
    gathered = {
        pair.destination.buffer: pair
        for op in program.ops()
        if isinstance(op, ops.AllGather)
        for pair in op.pairs
    }
    for step in steps:
        assert str(buffers[step.direction.buffer].dtype) == "bf16"
        assert gathered[step.direction.buffer].source == step.direction
        (momentum,) = step.states
        assert 2 * buffers[momentum.buffer].numel == whole.buffer_by_name[momentum.buffer].numel
    assert not any(isinstance(op, ops.AllGather) for op in whole.ops())


def test_each_gather_of_directions_overlaps_the_step_before() -> None:
    program = compiled("muon", stage=2, world_size=2, overlap_update=False)
    order = [
        "gather" if isinstance(op, ops.AllGather) else "step"
        for op in program.section_by_name["update"].body
        if (isinstance(op, ops.OptimizerStep) and op.algorithm is Algorithm.MUON)
        or (
            isinstance(op, ops.AllGather)
            and any(pair.destination.buffer.endswith(".direction") for pair in op.pairs)
        )
    ]
    assert order == ["gather", "gather", "step", "gather", "step", "step"]


@pytest.mark.slow
def test_muons_products_are_counted_on_the_rank_that_has_most() -> None:
    def flops(**options: object) -> dict[str, int]:
        program = compiled("muon", **options)
        return {
            op.param.buffer: update_flops(program, op)
            for op in program.ops()
            if isinstance(op, ops.OptimizerStep) and op.algorithm is Algorithm.MUON
        }

    square, tall, wide = (
        4 * short**2 * long + 2 * short**3 for short, long in ((35, 35), (35, 51), (3, 51))
    )
    alone = flops(world_size=1, stage=0)
    assert sorted(alone.values()) == [5 * square, 5 * square, 5 * (tall + wide)]
    assert sum(flops(world_size=1, stage=0, ns_steps=2).values()) * 5 == sum(alone.values()) * 2
    # Every slice meets the square matrix of its flat, and the last one the wide matrix, too.
    assert sorted(flops(world_size=3, stage=3).values()) == sorted(alone.values())
    many = flops(world_size=64, stage=1)
    assert max(many.values()) == 5 * tall


@pytest.mark.slow
def test_adafactors_moments_are_few_and_alike_on_every_rank() -> None:
    program = compiled("adafactor", stage=3, world_size=3)
    factors = {b.name: b.numel for b in program.buffers if b.name.endswith(".factors")}
    assert factors["blocks.0.factors"] == 35 + 35 + 35
    assert sum(factors.values()) < program.parameters_numel / 4
    # Of the convolution [5, 3, 3] five matrices, and of the bias and the scalar each element.
    assert factors["root.pre.factors"] == 5 * (3 + 3) + 5 + 1
    assert verify(program).is_valid


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "shampoo"])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "world_size": 1},
        {"stage": 3, "world_size": 2},
        {"stage": 1, "world_size": 3, "precision": "fp16"},
    ],
    ids=str,
)
def test_a_step_takes_no_more_memory_than_is_declared(
    optimizer: str, options: dict[str, object]
) -> None:
    program = compiled(optimizer, **options)
    file = load_model_file(MODEL)
    judged = judge(program, [file.batch()], model=file.model())
    steps = [
        verdict
        for verdict in judged.verdicts
        if isinstance(verdict.op, ops.OptimizerStep) and str(verdict.op.algorithm) == optimizer
    ]
    assert steps
    assert all(step.is_right and step.peak_bytes for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "muon", "adafactor", "shampoo"])
def test_states_are_the_same_bits_at_every_stage(optimizer: str) -> None:
    file = load_model_file(MODEL)
    states = []
    for stage in range(4):
        lockstep = Lockstep(compiled(optimizer, stage=stage, world_size=3), seed=stage)
        lockstep.initialise(file.model, 0)
        for _ in range(2):
            lockstep.step([[file.batch()] for _ in range(3)])
        states.append(lockstep.full_state())
    names = {quantity for _, quantity in states[0]}
    assert (
        names
        >= {
            "lion": {"exp_avg"},
            "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
            "adafactor": {"factors"},
            "shampoo": {"preconditioners", "exp_avg", "exp_avg_sq"},
        }[optimizer]
    )
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[key], states[0][key]) for key in state)


@pytest.mark.slow
def test_shampoos_sums_are_sharded_and_gathered() -> None:
    """Of each matrix both sums, cut without regard to where they begin."""
    alone = compiled("shampoo", stage=0, world_size=1).buffer_by_name
    program = compiled("shampoo", stage=2, world_size=3)
    name = "blocks.0.preconditioners"
    assert alone[name].numel == 2 * 35 * 35
    assert program.buffer_by_name[name].numel == 1024  # a third, in multiples of 256
    sources = {
        pair.source.buffer: pair.destination
        for op in program.ops()
        if isinstance(op, ops.AllGather)
        for pair in op.pairs
    }
    assert sources[name].buffer == "blocks.0.whole"
    assert sources[name].numel == 3 * 1024


def test_a_model_without_matrices_trains_by_muon(tmp_path: Path) -> None:
    path = tmp_path / "vector.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(5))\n"
        "    def forward(self, x):\n"
        "        return (x * self.w).square().mean()\n"
        "def model():\n"
        "    return Net()\n"
        "def batch():\n"
        "    return (torch.ones(2, 5),)\n"
    )
    comparison = check_model(
        str(path), make_options({"optimizer": "muon", "world_size": 2}), steps=2, seed=0
    )
    assert comparison.is_equal
