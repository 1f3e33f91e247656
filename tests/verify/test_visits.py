"""Every damage to a visit is rejected, whichever visit of a schedule it is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.edits import at, places, put
from tests.support.mutate_visits import VISIT_MUTATIONS
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.verify import Reference, verify

CASES = {
    "stage 0": Case(stage=0, precision="fp16", clip=1.0, has_parameters_on_host=True),
    "stage 1": Case(stage=1, has_parameters_on_host=True, is_grouped=True),
    "stage 3": Case(stage=3, precision="bf16", overlap_update=True, has_parameters_on_host=True),
}


@pytest.mark.parametrize("name", CASES)
def test_no_transfer_of_a_visit_can_be_left_out(name: str) -> None:
    case = CASES[name]
    program, logical = case.scheduled, Reference(case.logical)
    codes: set[str] = set()
    for place in places(program, lambda op: isinstance(op, ops.ToDevice | ops.ToHost)):
        findings = verify(put(program, place), logical).findings
        assert findings, at(program, place)
        codes.add(findings[0].code)
    # An arrival: its parameters are not there. A departure: its home keeps the old ones.
    assert codes <= {"Z101", "Z103", "Z202", "Z401", "Z403"}
    assert len(codes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_wait_of_a_visit_can_be_left_out(name: str) -> None:
    case = CASES[name]
    program, logical = case.scheduled, Reference(case.logical)
    for place in places(program, lambda op: isinstance(op, ops.Wait)):
        assert verify(put(program, place), logical).findings, place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["early-release", "half-transfer", "other-slice"])
@pytest.mark.parametrize("name", CASES)
def test_damages_that_never_pass(name: str, kind: str) -> None:
    case = CASES[name]
    logical = Reference(case.logical)
    damaged = 0
    for seed in range(12):
        mutant = VISIT_MUTATIONS[kind](case.scheduled, Random(seed))
        if mutant is not None:
            damaged += 1
            assert verify(mutant, logical).findings, seed
    assert damaged or kind == "other-slice"


def test_a_visit_too_many_exceeds_the_bound() -> None:
    """A transfer that begins earlier is right in every value, but takes more memory than the bound allows."""
    case = CASES["stage 0"]
    program = replace(case.scheduled)
    section = program.sections[0]
    allocs = [
        i
        for i, op in enumerate(section.body)
        if isinstance(op, ops.Alloc) and op.stream == "copy_in"
    ]
    waits = [i for i in range(allocs[-1]) if isinstance(section.body[i], ops.Wait)]
    bounding = [i for i in waits if getattr(section.body[i], "on", "") == "copy_in"]
    found = [verify(put(program, (0, i)), case.logical).findings[0].code for i in bounding]
    assert "Z302" in found
