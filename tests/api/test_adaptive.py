"""``--offload adaptive`` moves what exceeds a budget of memory, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.api.compiling import load_program
from zeroir.api.search.adaptive import (
    Measure,
    chosen_in_words,
    least_offload,
    movable_units,
    offload_settings,
    settled,
)
from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.artifact import Artifact, save
from zeroir.config import CompileOptions, make_options, replaced
from zeroir.config.offload_places import OFFLOADED
from zeroir.config.searched import Value
from zeroir.cost.machine import load_machine
from zeroir.cost.search import SearchOutcome
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.memory.footprint import footprint
from zeroir.passes.pipelines import for_options, lower

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


LOGICAL = mlp(blocks=4, dim=64)


def needed_bytes(options: CompileOptions) -> int:
    program = replace(LOGICAL, options=options)
    return footprint(applied(program, for_options(options))).total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_a_program_fits_its_budget_and_would_not_with_a_unit_less(stage: int, share: float) -> None:
    plain = make_options({"world_size": 2, "stage": stage})
    budget_bytes = int(needed_bytes(plain) * share)
    asked = {"offload": "adaptive", "memory_budget": str(budget_bytes)}
    options = settled(LOGICAL, make_options({"world_size": 2, "stage": stage, **asked}))
    assert "adaptive" not in options.offload.what
    assert needed_bytes(options) <= budget_bytes
    units = movable_units(LOGICAL)
    for kind in options.offload.what:
        moved = [u for u in units[kind] if u in options.offload.units_of(kind)] or [*units[kind]]
        less = {
            other: [f"{other}:{unit}" for unit in options.offload.units_of(other)]
            or [f"{other}:{unit}" for unit in units[other]]
            for other in options.offload.what
        }
        less[kind] = [f"{kind}:{unit}" for unit in moved[:-1]]
        changed = {
            "offload": [other for other in options.offload.what if less[other]],
            "offload_units": [pattern for patterns in less.values() for pattern in patterns],
        }
        assert needed_bytes(replaced(options, **fields(changed))) > budget_bytes


MODELS = {
    "equal blocks": mlp(blocks=3, dim=64, batch=1024),
    "fp16, clipped": mlp(blocks=2, dim=64, batch=256, precision="fp16", clip=1.0),
    "tied, averaged": mlp(blocks=2, dim=48, batch=512, precision="bf16", tied=True, ema=0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("equal blocks", 0.4), ("fp16, clipped", 0.1), ("tied, averaged", 0.1)]
)
def test_no_smaller_choice_would_fit(name: str, share: float) -> None:
    """Of all that moves no more of any kind, and less of one; memory is not said to fall with every unit."""
    logical = MODELS[name]
    plain = make_options({"world_size": 2, "stage": 1})
    measurer = CandidateMeasurer(logical, plain, 10**12, None)
    units = movable_units(logical)

    def needed(counts: Mapping[str, int]) -> int:
        return measurer.measure(offload_settings(units, counts))[0].needed_bytes

    most, least = needed({}), needed({kind: len(units[kind]) for kind in units})
    budget_bytes = int(least + (most - least) * share)
    asked = {"offload": ("adaptive",), "memory_budget": str(budget_bytes)}
    options = settled(logical, replaced(plain, **asked))
    chosen = {
        kind: len(options.offload.units_of(kind)) or len(units[kind])
        for kind in options.offload.what
    }
    assert needed(chosen) <= budget_bytes
    for numbers in product(*(range(count + 1) for count in chosen.values())):
        counts = dict(zip(chosen, numbers, strict=True))
        assert counts == chosen or needed(counts) > budget_bytes


def fields(values: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(items) for name, items in values.items()}


def test_a_budget_that_nothing_fits_moves_everything() -> None:
    asked = {"offload": "adaptive", "memory_budget": "1kB"}
    options = settled(LOGICAL, make_options({"world_size": 2, **asked}))
    assert {"optimizer", "parameters"} <= set(options.offload.what)
    assert options.offload.units == ()


def test_a_budget_that_fits_offloads_nothing() -> None:
    asked = {"offload": "adaptive", "offload_to": "disk", "memory_budget": "1GB"}
    options = settled(LOGICAL, make_options({"world_size": 2, **asked}))
    assert (options.offload.what, options.offload.to) == ((), "host")


@pytest.mark.slow
def test_on_a_machine_the_choice_is_of_several_orders() -> None:
    plain = make_options({"world_size": 2})
    budget_bytes = int(needed_bytes(plain) * 0.8)
    asked = make_options(
        {"world_size": 2, "offload": "adaptive", "memory_budget": str(budget_bytes)}
    )
    options = settled(LOGICAL, asked, load_machine("cpu-local"))
    assert options.offload.what
    assert needed_bytes(options) <= budget_bytes


def test_what_was_chosen_is_said_in_a_sentence() -> None:
    base = make_options({"world_size": 1})
    assert chosen_in_words(base) == "Nothing is offloaded: the program fits its budget without."
    offloaded = ("optimizer", "activations")
    units = ("activations:blocks.10", "activations:blocks.9", "activations:blocks.11")
    some = replaced(base, offload=offloaded, offload_units=units)
    assert chosen_in_words(some) == "Offloaded: optimizer, activations of blocks.9-11."


@pytest.mark.slow
def test_for_another_world_size_the_choice_is_made_anew(tmp_path: Path) -> None:
    """A rank of more ranks has less to keep, so less of it is moved."""
    plain = make_options({"world_size": 2})
    budget = {"memory_budget": str(int(needed_bytes(plain) * 0.8))}
    asked = make_options({"world_size": 2, "offload": "adaptive", **budget})
    logical = replace(LOGICAL, options=asked)
    artifact = Artifact(
        logical=logical,
        scheduled=lower(LOGICAL, settled(LOGICAL, asked)),
        model_path="model.py",
        model_sha256="0" * 64,
        torch_version="2.13.0",
        zeroir_version="0",
    )
    save(artifact, tmp_path / "a.zir")
    compiled = load_program(tmp_path / "a.zir")
    assert compiled.options.offload.what
    assert "adaptive" not in compiled.options.offload.what
    alone = compiled.specialise(world_size=1)
    assert len(moved(alone.options)) > len(moved(compiled.options))
    assert needed_bytes(alone.options) <= parse_bytes(budget["memory_budget"])


def moved(options: CompileOptions) -> set[str]:
    """What is moved of which units."""
    return {
        f"{kind}:{unit}"
        for kind in options.offload.what
        for unit in movable_units(LOGICAL)[kind]
        if not options.offload.units_of(kind) or unit in options.offload.units_of(kind)
    }
