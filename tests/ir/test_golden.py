"""What a person reads, as a file: the step from stage 2 to stage 3."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.ir.program import Program
from zeroir.passes.pipelines import lower
from zeroir.report.diff import diff, summary

GOLDEN = Path(__file__).parents[1] / "data" / "stage_2_to_3.diff"


def at_stage(stage: int) -> Program:
    options = make_options({"stage": stage, "world_size": 4, "precision": "bf16"})
    return lower(mlp(blocks=2, precision="bf16"), options)


def test_the_step_from_stage_2_to_stage_3(update_golden: bool) -> None:
    old, new = at_stage(2), at_stage(3)
    text = diff(old, new, old_name="stage2.zir", new_name="stage3.zir")
    text += f"\n{summary(old, new)}\n"
    if update_golden:
        GOLDEN.write_text(text, "utf-8")
    assert text == GOLDEN.read_text("utf-8"), "look at the change; --update-golden accepts it"
