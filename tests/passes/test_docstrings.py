"""The example in every pass's docstring is real: it parses, is valid, and is what the pass makes of it.

An example shows the items (flats, buffers, sections, …) of ``example.zir`` that the pass changes; all others are as in
the program to which the passes before it have been applied.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.passes.items import items
from tests.support.lowering import applied
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.bucket import Bucket
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import PASSES, for_stage, parse_spec
from zeroir.passes.plan_memory import PlanMemory
from zeroir.passes.recompute import Recompute
from zeroir.passes.select_saved import SelectSaved
from zeroir.passes.unshard import Unshard

LOGICAL = parse((Path(__file__).parent / "example.zir").read_text())
SAVING = parse((Path(__file__).parent / "saved.zir").read_text())
KEEPING = parse((Path(__file__).parent / "kept.zir").read_text())
LOGICALS: Mapping[type[Pass], Program] = {SelectSaved: SAVING, Recompute: KEEPING}
# One live gradient, so that two units are enough to see it.
PIPELINE = for_stage(3, 4, replicas=2, live=1)
EXAMPLES: tuple[tuple[tuple[Pass, ...], Pass], ...] = (
    ((), SelectSaved()),
    ((), Recompute(units=("a",))),
    *((PIPELINE[:index], step) for index, step in enumerate(PIPELINE)),
    # Passes that a user may ask for, where they stand then.
    (for_stage(3, 2)[:6], Bucket(bytes=4096)),
    (for_stage(3, 2, live=1), OverlapUpdate()),
    (for_stage(3, 2)[:5], Unshard(units=("a",))),
    (for_stage(3, 2), PlanMemory()),
)


def _example(step: Pass) -> tuple[str, str, str]:
    """The spec, the text before and the text after that the docstring gives."""
    documentation = inspect.getdoc(inspect.getmodule(type(step))) or ""
    match = re.search(r"^Before ``(.*)``::\n(.*)^After::\n(.*)", documentation, re.S | re.M)
    assert match, f"{step.name} has no example"
    return match[1], textwrap.dedent(match[2]), textwrap.dedent(match[3])


def _completed(example: str, program: Program) -> tuple[Program, Mapping[str, str]]:
    shown = items(example)
    whole = items(print_program(program))
    assert shown.keys() <= whole.keys(), "the example shows what the program does not have"
    return parse("\n".join({**whole, **shown}.values())), shown


@pytest.mark.parametrize(("earlier", "step"), EXAMPLES, ids=[step.name for _, step in EXAMPLES])
def test_the_example_is_real(earlier: tuple[Pass, ...], step: Pass) -> None:
    spec, before_text, after_text = _example(step)
    assert parse_spec(spec) == step
    logical = LOGICALS.get(type(step), LOGICAL)
    before = applied(logical, earlier)
    after = manager.run(before, [step], reference=logical)
    shown_before, before_items = _completed(before_text, before)
    shown_after, after_items = _completed(after_text, after)
    assert shown_before == before
    assert shown_after == after
    assert step(shown_before) == replace(shown_after, passes=before.passes)
    # It shows all that changes, and nothing else.
    old, new = items(print_program(before)), items(print_program(after))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    assert before_items.keys() | after_items.keys() == {
        key for key in changed if not key.startswith("pass ")
    }


def test_every_pass_has_an_example() -> None:
    assert {type(step) for _, step in EXAMPLES} == set(PASSES)
