"""However slow reductions are, compute allocates no full gradient beyond the bound."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import LAST_MICRO_STEP


@examples(40)
@given(cases(stages=(2, 3)))
def test_no_more_units_than_allowed_are_live(case: Case) -> None:
    program = case.scheduled()
    for section in program.sections:
        assert max(happens.full_gradients_live(section.body, program)) <= case.live


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("live", [1, 2, 3])
def test_the_bound_is_reached(stage: int, live: int) -> None:
    """It holds nothing back that it need not hold back."""
    program = applied(mlp(blocks=6), for_stage(stage, 4, live=live))
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert max(happens.full_gradients_live(body, program)) == live


@pytest.mark.parametrize("stage", [2, 3])
def test_without_the_pass_all_may_be_live(stage: int) -> None:
    program = applied(mlp(blocks=6), for_stage(stage, 4)[:-1])
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert max(happens.full_gradients_live(body, program)) == 8
