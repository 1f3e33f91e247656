"""The verifier's own test: a mutant that some interleaving makes differ is rejected, and a valid program never is."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.mutate import MUTATIONS
from tests.support.schedules import Case, is_same, run
from zeroir.errors import ZeroirError
from zeroir.ir.diff import diff
from zeroir.ir.program import Program
from zeroir.ir.verify import verify

CASES = st.builds(
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
)
SETTINGS = settings(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def is_unharmed(mutant: Program, original: Program, schedule_seed: int) -> bool:
    """Whether one interleaving of the mutant computes what the original does."""
    try:
        found = run(mutant, schedule_seed=schedule_seed)
    except (ZeroirError, RuntimeError):
        return False
    return is_same(found, run(original))


def check_mutant(case: Case, kind: str, seed: int, schedule_seeds: range) -> None:
    original = case.scheduled
    mutant = MUTATIONS[kind](original, Random(seed))
    if mutant is None or not verify(mutant, case.logical).is_valid:
        return
    for schedule_seed in schedule_seeds:
        assert is_unharmed(mutant, original, schedule_seed), (
            f"{kind} is proved, but differs under schedule seed {schedule_seed}:\n"
            f"{diff(original, mutant)}"
        )


@settings(SETTINGS, max_examples=150)
@given(case=CASES, kind=st.sampled_from(sorted(MUTATIONS)), seed=st.integers(0, 10**9))
def test_a_mutant_that_differs_is_rejected(case: Case, kind: str, seed: int) -> None:
    check_mutant(case, kind, seed, range(2))


@pytest.mark.slow
@settings(SETTINGS, max_examples=3000)
@given(case=CASES, kind=st.sampled_from(sorted(MUTATIONS)), seed=st.integers(0, 10**9))
def test_many_mutants_that_differ_are_rejected(case: Case, kind: str, seed: int) -> None:
    check_mutant(case, kind, seed, range(4))


@settings(SETTINGS, max_examples=40)
@given(case=CASES)
def test_a_schedule_is_proved(case: Case) -> None:
    report = verify(case.scheduled, case.logical)
    assert report.is_valid, report.render()


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
    for seed in range(5):
        mutant = MUTATIONS[kind](case.scheduled, Random(seed))
        assert mutant is not None
        codes = {finding.code for finding in verify(mutant).findings}
        assert codes & ALWAYS_WRONG[kind], f"{kind} {seed}: {codes}"
