"""The verifier rejects each mutant that computes another result in some interleaving, and no valid program."""

from functools import lru_cache
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import IS_THOROUGH, examples
from tests.support.lockstep import LockstepResult
from tests.support.lowering import codes
from tests.support.mutate import MUTATIONS
from tests.support.schedules import Case, is_same, run
from tests.support.subjects import CASES, NAMES, WRITTEN, subject
from zeroir.errors import ZeroirError
from zeroir.ir.program import Program
from zeroir.report.diff import diff
from zeroir.verify import Reference, verify

ANY_CASE = st.builds(
    Case,
    stage=st.sampled_from([0, 1, 2, 3, 3, 3]),
    ranks=st.sampled_from([2, 3]),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
    micro_steps=st.sampled_from([1, 2]),
    clip=st.sampled_from([None, 1.0]),
    tied=st.booleans(),
    keep_fp32=st.booleans(),
    elide=st.booleans(),
    distance=st.integers(0, 2),
    bucket=st.sampled_from([0, 0, 10_000]),
    overlap_update=st.booleans(),
    ema=st.sampled_from([None, None, 0.5]),
    optimizer=st.sampled_from(["adamw", "adamw", "adafactor"]),
    is_grouped=st.booleans(),
    has_codes=st.sampled_from([False, False, True]),
    has_parameters_on_host=st.sampled_from([False, False, True]),
).filter(lambda case: not case.has_codes or case.optimizer == "adamw")
CHECKS = [HealthCheck.filter_too_much, HealthCheck.too_slow]
SETTINGS = settings(deadline=None, suppress_health_check=CHECKS)


Mutants = list[tuple[str, int]]
"""Kinds of damage, each with the seed that determines its place."""
# Making a schedule takes longer than judging a mutant of it, so each schedule is damaged several times.
MUTANTS = st.lists(
    st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 10**9)), min_size=5, max_size=5
)


@lru_cache(maxsize=1)
def unharmed(case: Case) -> LockstepResult:
    """The result of the case's schedule, which is the same in every interleaving."""
    return run(case.scheduled)


def is_unharmed(mutant: Program, case: Case, schedule_seed: int) -> bool:
    """Whether one interleaving of the mutant computes what the original does."""
    try:
        found = run(mutant, schedule_seed=schedule_seed)
    except (ZeroirError, RuntimeError):
        return False
    return is_same(found, unharmed(case))


def check_mutants(case: Case, mutants: Mutants, schedule_seeds: range) -> None:
    original, logical = case.scheduled, Reference(case.logical)
    for kind, seed in mutants:
        mutant = MUTATIONS[kind](original, Random(seed))
        if mutant in (None, original) or not verify(mutant, logical).is_valid:
            continue
        for schedule_seed in schedule_seeds:
            assert is_unharmed(mutant, case, schedule_seed), (
                f"{kind} is proved, but differs under schedule seed {schedule_seed}:\n"
                f"{diff(original, mutant)}"
            )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(SETTINGS, max_examples=200)
@given(case=ANY_CASE, mutants=MUTANTS)
def test_many_mutants_that_differ_are_rejected(case: Case, mutants: Mutants) -> None:
    check_mutants(case, mutants, range(2))


@examples(40, suppress_health_check=CHECKS)
@given(case=ANY_CASE)
def test_a_schedule_is_proved(case: Case) -> None:
    report = verify(case.scheduled, case.logical)
    assert report.is_valid, report.render()


def check_subject(name: str, kind: str, seed: int, schedule_seeds: range) -> None:
    made = subject(name)
    mutant = MUTATIONS[kind](made.scheduled, Random(seed))
    if mutant in (None, made.scheduled) or not verify(mutant, made.logical).is_valid:
        return
    for schedule_seed in schedule_seeds:
        why = made.difference(mutant, schedule_seed)
        assert why is None, f"{kind} is proved, but: {why}\n{diff(made.scheduled, mutant)}"


KINDS = st.sampled_from(sorted(MUTATIONS))
SEEDS = st.integers(0, 10**9)


@examples(60, suppress_health_check=CHECKS)
@given(name=st.sampled_from(WRITTEN), kind=KINDS, seed=SEEDS)
def test_a_mutant_of_a_written_schedule_that_differs_is_rejected(
    name: str, kind: str, seed: int
) -> None:
    check_subject(name, kind, seed, range(1))


@pytest.mark.slow
@settings(SETTINGS, max_examples=1000)
@given(name=st.sampled_from(NAMES), kind=KINDS, seed=SEEDS)
def test_many_mutants_of_all_programs_that_differ_are_rejected(
    name: str, kind: str, seed: int
) -> None:
    check_subject(name, kind, seed, range(2))


@pytest.mark.parametrize("kind", sorted(MUTATIONS))
def test_every_damage_is_done_to_some_program(kind: str) -> None:
    """A damage that applies to no program would test nothing."""
    names = (*CASES, *WRITTEN)
    assert any(
        MUTATIONS[kind](subject(name).scheduled, Random(seed))
        not in (None, subject(name).scheduled)
        for name in names
        for seed in range(20)
    )


ALWAYS_WRONG = {
    "change-divisor": {"Z402", "Z405"},
    "drop-release": {"Z104", "Z202"},
    "forget-skip": {"Z405"},
    "unname-gradient": {"Z402"},
}


@pytest.mark.parametrize("kind", ALWAYS_WRONG)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_some_damages_never_pass(kind: str, stage: int) -> None:
    case = Case(stage=stage, precision="fp16", clip=1.0, tied=True)
    for seed in range(5 if IS_THOROUGH else 2):
        mutant = MUTATIONS[kind](case.scheduled, Random(seed))
        assert mutant is not None
        assert codes(mutant) & ALWAYS_WRONG[kind], f"{kind} {seed}"
