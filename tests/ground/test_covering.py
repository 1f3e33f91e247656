"""A covering array leaves out no meeting of values that a possible case has."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import covering

POSSIBLE = [
    case for case in product(range(4), "abc", (False, True), (None, 1)) if case[0] or case[2]
]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_values_meet_that_can(strength: int) -> None:
    chosen = covering(POSSIBLE, tuple, strength=strength)
    assert set(chosen) < set(POSSIBLE)
    of_all, of_chosen = (
        {meeting for case in cases for meeting in combinations(enumerate(case), strength)}
        for cases in (POSSIBLE, chosen)
    )
    assert of_chosen == of_all
    assert len(chosen) < len(POSSIBLE) * 3 // 4


def test_the_same_cases_are_chosen_in_every_process() -> None:
    assert covering(POSSIBLE, tuple) == covering(iter(POSSIBLE), tuple)
