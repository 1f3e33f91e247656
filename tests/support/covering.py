"""Cases in which any two values of two factors meet: tens of cases instead of a product of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from random import Random
from typing import Final, TypeVar

Case = TypeVar("Case", bound=Hashable)
_TRIED: Final = 200
"""How many cases a choice looks at, so that choosing among thousands takes little time."""


def covering(
    possible: Iterable[Case],
    factors: Callable[[Case], Sequence[Hashable]],
    *,
    strength: int = 2,
) -> tuple[Case, ...]:
    """Some of the possible cases: all values of ``strength`` factors that meet in a possible case meet in one of them.

    ``factors`` returns the values of a case, always in the same order. The first cases have the most new meetings.
    """
    meetings = {
        case: frozenset(combinations(enumerate(factors(case)), strength)) for case in possible
    }
    cases = tuple(meetings)
    missing = frozenset[object]().union(*meetings.values())
    random = Random(0)
    chosen: list[Case] = []
    while missing:
        tried = random.sample(cases, min(len(cases), _TRIED))
        best = max(tried, key=lambda case: len(meetings[case] & missing))
        if meetings[best] & missing:
            missing -= meetings[best]
            chosen.append(best)
    return tuple(chosen)
