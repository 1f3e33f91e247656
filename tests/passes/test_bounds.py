"""Bounds hold in every order of the streams, whatever passes run after the one that states them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.edits import is_of, without_each
from tests.support.examples import examples
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.bounds import AheadBound, BehindBound, BoundKind
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.ir.text import parse, print_program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.communication.bound_gradients import BoundGradients
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.communication.prefetch import PrefetchGathers
from zeroir.passes.communication.unshard import Unshard
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import parse_spec
from zeroir.verify import verify

GRADIENTS = AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=0)


def _passes(*specs: str) -> tuple[Pass, ...]:
    """Stage 3 on 2 ranks up to the releases, and these."""
    return (*for_stage(3, 2)[:-2], *map(parse_spec, specs))


def _waits(program: Program, section: str = LAST_MICRO_STEP) -> int:
    return sum(isinstance(op, ops.Wait) for op in program.section_by_name[section].body)


def test_a_bound_survives_a_pass_that_moves_gathers() -> None:
    """The two passes that bound memory may stand in either order."""
    logical = mlp(blocks=4)
    before = applied(logical, _passes("bound-gradients{live=1}", "prefetch{distance=1}"))
    after = applied(logical, _passes("prefetch{distance=1}", "bound-gradients{live=1}"))
    assert GRADIENTS in before.bounds
    assert before.sections == after.sections
    body = before.section_by_name[LAST_MICRO_STEP].body
    assert max(happens.full_gradients_live(body, before)) == 1
    assert max(happens.groups_live(body, before)) == 2
    unbounded = applied(logical, _passes("prefetch{distance=1}"))
    assert _waits(before) == _waits(unbounded) + 5


def test_a_later_bound_of_the_same_kind_replaces_the_earlier_one() -> None:
    twice = applied(mlp(), _passes("bound-gradients{live=3}", "bound-gradients{live=1}"))
    once = applied(mlp(), _passes("bound-gradients{live=1}"))
    assert twice.bounds == once.bounds == (GRADIENTS,)
    assert twice.sections == once.sections


def test_bounds_are_lines_of_the_header() -> None:
    program = applied(mlp(), _passes("bound-gradients{live=1}", "prefetch{budget=0}"))
    assert program.bounds == (
        GRADIENTS,
        BehindBound(kind=BoundKind.FULL_PARAMETERS, behind=COMPUTE),
    )
    lines = print_program(program).splitlines()
    assert [line for line in lines if line.startswith("bound ")] == [
        "bound full_gradients ahead=0",
        "bound full_parameters behind=compute",
    ]
    assert parse("\n".join(lines)).bounds == program.bounds


# ---------------------------------------------------------------------------------------------------- any legal order

_OTHERS: tuple[Pass, ...] = (
    Unshard(),
    Bucket(bytes=2048),
    PrefetchGathers(distance=1),
    PrefetchGathers(budget=0),
    BoundGradients(live=1),
    BoundGradients(live=2),
    OverlapUpdate(),
    OffloadActivations(smallest=0),
    parse_spec("replicate-shards{replicas=2}"),
    parse_spec("offload-parameters"),
    parse_spec("plan-memory"),
)


def _in_any_legal_order(program: Program, wanted: Sequence[Pass]) -> Program:
    """The program after those of these passes that their contracts let follow what ran before."""
    for step in wanted:
        try:
            manager.check_contracts(program, [step])
        except UserError:
            continue
        program = manager.apply(step, program)
    return program


@examples(25)
@given(cases(world_sizes=(1, 2)), st.randoms(use_true_random=False))
def test_every_bound_holds_after_any_legal_order_of_passes(case: Case, choice: Random) -> None:
    """An independent judge of happens-before counts what may be live; the verifier finds the program valid."""
    logical = case.logical()
    wanted: list[Pass] = list(for_stage(case.stage, case.world_size, elide=case.elide))
    for extra in choice.sample(_OTHERS, choice.randint(0, 5)):
        wanted.insert(choice.randint(0, len(wanted)), extra)
    program = _in_any_legal_order(logical, wanted)
    report = verify(program, reference=logical)
    assert report.is_valid, f"{program.passes}\n{report.render()}"
    for bound in program.bounds:
        if bound.kind is BoundKind.FULL_GRADIENTS:
            assert isinstance(bound, AheadBound)
            for section in program.sections:
                assert max(happens.full_gradients_live(section.body, program)) <= bound.ahead + 1


# --------------------------------------------------------------------------------------------------------- the law


@pytest.mark.slow
@pytest.mark.parametrize("specs", ["distance=0", "distance=2", "budget=0", "budget=9000"])
def test_a_program_without_a_wait_that_bounds_it_is_rejected(specs: str) -> None:
    """Each wait is for data, and then another law notices, or for a bound, and then Z302 does."""
    logical = mlp(blocks=3)
    program = applied(logical, _passes(f"prefetch{{{specs}}}", "bound-gradients{live=1}"))
    assert verify(program).is_valid
    first_codes: list[str] = []
    for where, mutant in without_each(program, is_of(ops.Wait)):
        findings = verify(mutant).findings
        assert findings, where
        first_codes.append(findings[0].code)
    assert first_codes.count("Z302") >= 4


def test_a_bound_that_no_wait_keeps_is_rejected() -> None:
    program = applied(mlp(blocks=3), _passes())
    assert verify(program).is_valid
    for kind in (BoundKind.FULL_PARAMETERS, BoundKind.FULL_GRADIENTS):
        for bound in (AheadBound(kind=kind, ahead=0), BehindBound(kind=kind, behind="reduce")):
            report = verify(replace(program, bounds=(bound,)))
            assert codes(report) == {"Z302"}
            assert report.findings[0].advice.startswith("Let op ")
    loose = replace(program, bounds=(AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=9),))
    assert verify(loose).laws["Z302"] == "proved"
    assert "Z302" not in verify(program).laws


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ((AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=-1),), "Z008"),
        ((BehindBound(kind=BoundKind.FULL_GRADIENTS, behind="nowhere"),), "Z001"),
        ((GRADIENTS, GRADIENTS), "Z002"),
    ],
)
def test_a_bound_is_well_formed(bounds: tuple[AheadBound | BehindBound, ...], code: str) -> None:
    assert codes(replace(mlp(), bounds=bounds)) == {code}
