"""Training in optimizer groups against torch.optim with the same groups on eager replicas, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest

from tests.support.captures import ROOT
from tests.support.covering import covering
from zeroir.api.checks.check import check_model
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.ir.contents import FlatContent
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.forms import CODES

MODEL = str(ROOT / "tests" / "support" / "models" / "two_blocks.py")

PATTERNS = ("blocks.*:lr=0.01,beta1=0.8", "head.bias:eps=1e-3,weight_decay=0.2")
ADAMW = {"weight_decay": 0.1, "no_decay": True, "group": PATTERNS}
MOMENTUM = {
    "optimizer": "momentum",
    "weight_decay": 0.1,
    "group": ("*.bias:momentum=0.5,weight_decay=0", "head:lr=0.1,nesterov=true"),
}
EIGHT_BIT = {
    "optimizer_bits": 8,
    "weight_decay": 0.1,
    "no_decay": True,
    "group": (
        "head:optimizer_bits=32",
        "norm:optimizer=lion,lr=0.01",
        "*.bias:optimizer=momentum,momentum=0.7",
    ),
}
MIXED: dict[str, object] = {
    "group": ("norm:optimizer=sgd,lr=0.1", "*.bias:optimizer=momentum,momentum=0.7")
}


GROUPS: dict[str, dict[str, object]] = {
    "adamw": ADAMW,
    "momentum": MOMENTUM,
    "mixed": MIXED,
    "8 bits": EIGHT_BIT,
}
OPTIONS: tuple[dict[str, object], ...] = (
    {"stage": 0, "world_size": 1},
    {"stage": 1, "world_size": 3},
    {"stage": 2, "world_size": 4, "overlap_update": False},
    {"stage": 3, "world_size": 3},
    {"stage": 3, "mesh": "replicate=2,shard=2", "precision": "bf16"},
    {"stage": 3, "world_size": 3, "precision": "fp16", "initial_loss_scale": 2.0**30},
    {"stage": 2, "world_size": 3, "precision": "bf16", "micro_steps": 2},
)


_FACTORS: Final = sorted({key for options in OPTIONS for key in options})


def _factors(case: tuple[str, int]) -> tuple[object, ...]:
    """The groups, and each option by itself."""
    groups, number = case
    return groups, *(OPTIONS[number].get(key) for key in _FACTORS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "options"),
    [
        pytest.param(
            groups, OPTIONS[number], id="-".join(map(str, (groups, *OPTIONS[number].values())))
        )
        for groups, number in covering(product(GROUPS, range(len(OPTIONS))), _factors)
    ],
)
def test_it_equals_torch_with_the_same_groups(groups: str, options: dict[str, object]) -> None:
    comparison = check_model(MODEL, make_options({**GROUPS[groups], **options}), steps=4, seed=1)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0


@pytest.mark.slow
def test_each_setting_of_a_group_counts() -> None:
    """Otherwise the comparison above would hold for groups that nobody applies."""
    losses = [
        check_model(MODEL, make_options({"world_size": 1, **changed}), steps=4, seed=1).losses[-1]
        for changed in (
            {},
            ADAMW,
            {**ADAMW, "no_decay": False},
            {**ADAMW, "group": PATTERNS[:1]},
            {**ADAMW, "group": PATTERNS[::-1]},
        )
    ]
    assert len(set(losses)) == len(losses) - 1  # these patterns have no parameter in common


@pytest.mark.slow
def test_flats_are_split_by_algorithm_and_bits_alone() -> None:
    whole = compile_with(MODEL, make_options({"world_size": 2}))
    grouped = compile_with(MODEL, make_options({"world_size": 2, **ADAMW}))
    assert [f.name for f in grouped.program.flats] == [f.name for f in whole.program.flats]
    assert [len(s.body) for s in grouped.program.sections] == [
        len(s.body) for s in whole.program.sections
    ]
    mixed = compile_with(MODEL, make_options({"world_size": 2, **MIXED}))
    assert {f.name for f in mixed.program.flats} == {
        "blocks.0",
        "blocks.0.momentum",
        "blocks.1",
        "blocks.1.momentum",
        "root.post.momentum",
        "root.post.sgd",
        "root.post",
    }
    assert {g.name: g.algorithm for g in mixed.program.groups} == {
        "default": Algorithm.ADAMW,
        "norm": Algorithm.SGD,
        "bias": Algorithm.MOMENTUM,
    }
    coded = compile_with(MODEL, make_options({"world_size": 2, **EIGHT_BIT}))
    assert {f.name for f in coded.program.flats} == {
        "blocks.0",
        "blocks.0.momentum",
        "blocks.1",
        "blocks.1.momentum",
        "root.post.lion",
        "root.post.32bit",
    }
    kept = {
        buffer.holds.quantity
        for buffer in coded.program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.flat == "root.post.32bit"
    }
    assert kept >= {"exp_avg", "exp_avg_sq"}
    assert not kept & {*CODES.values()}
