"""``--offload adaptive`` moves what exceeds a budget of memory, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.api.adaptive import Measure, least_offload, offload_settings
from zeroir.api.candidates import Candidate
from zeroir.api.search_space import Value
from zeroir.config.offload_fields import OFFLOADED
from zeroir.cost.search import SearchOutcome

UNITS = {kind: tuple(f"u.{number}" for number in range(4)) for kind in OFFLOADED}
SETTINGS = {
    tuple(sorted(offload_settings(UNITS, counts).items())): counts
    for numbers in product(range(5), repeat=4)
    for counts in [dict(zip(OFFLOADED, numbers, strict=True))]
}
"""The counts of units by the settings that they amount to."""


def measured(
    freed: Mapping[str, int], budget_bytes: int, step_ns: Mapping[str, int] | None = None
) -> Measure:
    """A program of 100 bytes, of which each unit of a kind frees some and takes time."""

    def measure(settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
        counts = SETTINGS[tuple(sorted(settings.items()))]
        needed = 100 - sum(freed[kind] * count for kind, count in counts.items())
        times = step_ns or dict.fromkeys(OFFLOADED, 0)
        return (
            Candidate(settings=settings, needed_bytes=needed, resting_bytes=0, culprit=""),
            SearchOutcome(
                missing_bytes=max(0, needed - budget_bytes),
                needed_bytes=needed,
                step_ns=1 + sum(times[kind] * count for kind, count in counts.items()),
            ),
        )

    return measure


def test_settings_name_units_only_of_kinds_that_are_moved_in_part() -> None:
    counts = {"optimizer": 4, "activations": 2, "parameters": 0}
    assert offload_settings(UNITS, counts) == {
        "offload": ("optimizer", "activations"),
        "offload_units": ("activations:u.0", "activations:u.1"),
    }


@given(
    freed=st.fixed_dictionaries({kind: st.integers(0, 6) for kind in OFFLOADED}),
    budget_bytes=st.integers(0, 100),
)
def test_no_unit_could_come_back(freed: dict[str, int], budget_bytes: int) -> None:
    measure = measured(freed, budget_bytes)
    settings = least_offload(measure, UNITS, is_timed=False)
    counts = dict(SETTINGS[tuple(sorted(settings.items()))])
    everything = dict.fromkeys(OFFLOADED, 4)
    if not measure(offload_settings(UNITS, everything))[1].fits:
        assert counts == everything
        return
    assert measure(settings)[1].fits
    for kind in OFFLOADED:
        if counts[kind]:
            one_less = {**counts, kind: counts[kind] - 1}
            assert not measure(offload_settings(UNITS, one_less))[1].fits


def test_what_fits_moves_nothing() -> None:
    assert least_offload(measured(dict.fromkeys(OFFLOADED, 5), 100), UNITS, is_timed=False) == {}


@pytest.mark.parametrize(
    ("slow", "first"), [("optimizer", "activations"), ("activations", "optimizer")]
)
def test_of_what_fits_the_fastest_wins_on_a_machine(slow: str, first: str) -> None:
    times = {kind: 100 if kind == slow else 1 for kind in OFFLOADED}
    measure = measured(dict.fromkeys(OFFLOADED, 10), 80, times)
    assert least_offload(measure, UNITS, is_timed=True)["offload"] == (first,)


def test_states_go_first_where_no_machine_is_known() -> None:
    measure = measured(dict.fromkeys(OFFLOADED, 10), 55)
    assert least_offload(measure, UNITS, is_timed=False) == {
        "offload": ("optimizer", "gradients"),
        "offload_units": ("gradients:u.0",),
    }
