"""Units that stay gathered: one all-gather instead of two, no release in between, and the same numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.passes.variants import called_twice
from tests.support.examples import examples
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.communication.unshard import Unshard

ALL = ("*", "root.*")


def psi_bytes(program: Program, *units: str) -> int:
    """Bytes of the flats of these units, of all without any."""
    return sum(
        flat.padded_numel * flat.dtype.itemsize_bytes
        for flat in program.flats
        if not units or flat.unit in units
    )


@examples(16)
@given(cases(stages=(3,)), st.sampled_from([None, 1, 2]))
def test_with_all_units_two_psi_go_over_the_wire(case: Case, replicas: int | None) -> None:
    """As with FSDP's reshard_after_forward=False, whether unread gathers are left out or not."""
    world_size = case.world_size * (replicas or 1)
    passes = for_stage(
        3, world_size, replicas=replicas, elide=case.elide, bucket=case.bucket, unshard=ALL
    )
    program = applied(case.logical(), passes)
    axis = "dp" if replicas is None else "shard"
    sent = collective_bytes(program, axis=axis)
    assert sent["all_gather"] == psi_bytes(program)
    if case.micro_steps == 1:
        assert sent["reduce_scatter"] == psi_bytes(program)
    for section in program.sections:
        names = [life.buffer for life in happens.lives(section.body, program)]
        assert len(names) == len(set(names))


def test_only_the_units_that_are_named() -> None:
    logical = mlp(blocks=3)
    program = applied(logical, for_stage(3, 4, elide=False, unshard=("blocks.1",)))
    psi = psi_bytes(program)
    assert collective_bytes(program)["all_gather"] == 2 * psi - psi_bytes(program, "blocks.1")
    body = program.section_by_name[LAST_MICRO_STEP].body
    lives = [life for life in happens.lives(body, program) if life.buffer == "blocks.1.full"]
    assert [len(life.readers) for life in lives] == [2]
    assert lives[0].release > lives[0].readers[-1]


@examples(4)
@given(cases(stages=(3,), world_sizes=(3, 3)), st.sampled_from([ALL, ("blocks.0",)]), st.booleans())
def test_numbers_are_the_same(case: Case, units: tuple[str, ...], recompute: bool) -> None:
    passes = for_stage(
        3,
        3,
        elide=case.elide,
        distance=case.distance,
        live=case.live,
        unshard=units,
        recompute=("*",) if recompute else (),
    )
    plain = applied(case.logical(), case.passes())
    assert_same(proved(case.logical(), passes), plain, case.micro_steps, [7])


def test_over_groups_of_ranks() -> None:
    logical = mlp(blocks=2, micro_steps=2)
    kept, plain = (
        proved(logical, for_stage(3, 4, replicas=2, unshard=units)) for units in (ALL, ())
    )
    assert_same(kept, plain, 2)


def test_a_unit_that_is_called_twice_is_gathered_once() -> None:
    program = proved(called_twice(), for_stage(3, 2, unshard=("blocks.0",)))
    body = program.section_by_name[LAST_MICRO_STEP].body
    lives = [life for life in happens.lives(body, program) if life.buffer == "blocks.0.full"]
    assert [len(life.readers) for life in lives] == [4]


def test_buckets_hold_what_is_still_gathered() -> None:
    passes = for_stage(3, 2, bucket=1 << 20, unshard=("blocks.0", "root.*"))
    program = proved(mlp(blocks=3), passes)
    assert collective_bytes(program)["all_gather"] == psi_bytes(program) + psi_bytes(
        program, "blocks.1", "blocks.2"
    )


def test_it_stands_before_what_bounds_memory() -> None:
    with pytest.raises(UserError, match=r"which `prefetch\{distance=1\}` has ended; put `unshard`"):
        manager.run(mlp(blocks=1), (*for_stage(3, 2), Unshard()))


def test_a_name_of_no_unit_is_refused() -> None:
    with pytest.raises(UserError, match=r"`unshard\{units=layers\.\*\}` names no unit with"):
        manager.run(mlp(blocks=1), for_stage(3, 2, unshard=("layers.*",)))


@pytest.mark.slow
def test_units_that_are_used_again_soon_are_kept() -> None:
    """Each block needs twice the bytes of the units behind it; with fewer it is gathered once more."""
    logical = mlp(blocks=3)
    psi = psi_bytes(applied(logical, for_stage(3, 4)))

    def gathered(passes: tuple[Pass, ...]) -> int:
        return collective_bytes(applied(logical, passes))["all_gather"]

    totals = [
        gathered(for_stage(3, 4, unshard_bytes=within)) for within in range(1, 2 * psi, psi // 12)
    ]
    assert totals[0] == gathered(for_stage(3, 4))
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] == psi
    assert len(set(totals)) == 4


@pytest.mark.parametrize("within", [1, 3_000, 10**9])
def test_distances_leave_the_numbers_alone(within: int) -> None:
    logical = mlp(blocks=3)
    program = proved(logical, for_stage(3, 3, unshard_bytes=within))
    assert_same(program, applied(logical, for_stage(3, 3)), seeds=[7])


def test_a_negative_distance_is_refused() -> None:
    with pytest.raises(UserError, match="a number of bytes, at least 0, not -1"):
        Unshard(within=-1)
