"""On real models, and whatever changes when buffers live, the plan takes hardly more than is live at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.programs import mlp
from zeroir.api.compiled import capture
from zeroir.config import make_options
from zeroir.ir.buffers import Space
from zeroir.ir.memory.placement import place_all
from zeroir.ir.program import Program
from zeroir.passes.pipelines import for_options
from zeroir.passes.plan_memory import PlanMemory

MODELS = Path("tests/support/models")
BUCKET = {"bucket": 1_000_000}

CHANGES: tuple[Mapping[str, object], ...] = (
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"prefetch_budget": "1GB"},
    {"recompute": ("*",)},
    {"unshard": ("*",)},
    {"select_saved": False},
    {"overlap_update": False},
    BUCKET,
    {"bucket": 1_000_000, "prefetch": 2},
)
"""What changes lifetimes at stage 3; at the stages below, where most of this is nothing, the last and the first."""


def captured(path: Path, base: Mapping[str, object]) -> Program:
    return capture(path, make_options({"world_size": 4, **base})).logical


def worst_gap(
    logical: Program, base: Mapping[str, object], *, has_buckets: bool
) -> tuple[float, str]:
    """The largest gap of a model's plans at stages 1 to 3, and the options that make it."""
    found: list[tuple[float, str]] = []
    for stage in (1, 2, 3):
        for change in CHANGES if stage == 3 else ({}, BUCKET):
            if "bucket" in change and not has_buckets:
                continue
            options = make_options({"world_size": 4, **base, "stage": stage, **change})
            program = replace(logical, options=options.to_pairs())
            for step in for_options(options):
                if not isinstance(step, PlanMemory):
                    program = step(program)
            placement = place_all(program)[Space.DEVICE]
            assert placement.live_bytes <= placement.size_bytes
            found.append((placement.gap, f"stage {stage}, {change}"))
    return max(found)


def test_a_plan_is_as_tight_for_a_stack_of_linear_layers() -> None:
    gap, options = worst_gap(mlp(blocks=8, dim=64, batch=64), {}, has_buckets=True)
    assert gap <= 0.01, options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "base"),
    [
        (Path("examples/gpt.py"), {}),
        (Path("examples/gpt.py"), {"precision": "bf16", "clip": 1.0}),
        (MODELS / "gpt2.py", {"micro_steps": 2}),
        (MODELS / "llama.py", {"micro_steps": 2}),
        (MODELS / "vit.py", {}),
        (MODELS / "convnet.py", {"micro_steps": 2}),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "-".join(value) or "plain",
)
def test_a_plan_takes_at_most_a_hundredth_more_than_is_live_at_once(
    path: Path, base: Mapping[str, object]
) -> None:
    gap, options = worst_gap(captured(path, base), base, has_buckets=True)
    assert gap <= 0.01, options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "translator"])
def test_a_plan_is_as_tight_without_buckets(name: str) -> None:
    """With buckets no places at all come within a hundredth of the bound for these two, as an exact solver proves.

    Streams that run side by side make lives meet that no line of time orders, and then what is live at once in the
    worst order need not fit in as many bytes.
    """
    base = {"micro_steps": 2}
    logical = captured(MODELS / f"{name}.py", base)
    gap, options = worst_gap(logical, base, has_buckets=False)
    assert gap <= 0.01, options
