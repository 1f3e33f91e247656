"""Gathers as early as a budget allows: never over it in any order of the streams, never later than without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_same
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Space
from zeroir.ir.mesh import GATHER
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.curve import peak
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.passes.communication.prefetch import PrefetchGathers
from zeroir.passes.pipelines import for_options, parse_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the law is tried on; ``part`` of twice the parameters' bytes are added to the least that is needed."""

    case: Case
    overlap_update: bool
    recompute: bool
    part: float


def scheduled(choice: Choice, budget: int | None) -> Program:
    """The program with that budget; without one, with each gather at its first use."""
    case = choice.case
    is_free = case.clip is None and case.precision != "fp16"
    passes = for_stage(
        3,
        case.world_size,
        elide=case.elide,
        bucket=case.bucket,
        live=case.live,
        distance=0 if budget is None else 1,
        budget=budget,
        overlap_update=choice.overlap_update and is_free,
        recompute=("*",) if choice.recompute else (),
    )
    return applied(case.logical(), passes)


def most_bytes(program: Program) -> int:
    """The most that buffers take on the device in any order that the waits allow."""
    at_least, at_most = most_bytes_between(program)
    assert at_least == at_most
    return at_least


def most_bytes_between(program: Program) -> tuple[int, int]:
    """The same where it is not known exactly: that much is taken in some order, and in none more than the second."""
    names = program.buffer_by_name
    found = Lifetimes.of(program)
    sizes = [
        names[name].size_bytes if names[name].space is Space.DEVICE else 0 for name in found.buffers
    ]
    most = most_live(found, range(len(sizes)), sizes)
    resting = sum(
        b.size_bytes for b in program.buffers if b.is_persistent and b.space is Space.DEVICE
    )
    return most.size_bytes + resting, most.bound_bytes + resting


def waits(program: Program) -> int:
    return sum(isinstance(op, ops.Wait) for op in program.ops())


def waits_of_gathers(program: Program) -> list[int]:
    """How often the stream of gathers waits before each of its gathers."""
    found = [0]
    for op in program.ops():
        match op:
            case ops.Wait(on=stream) if stream == GATHER:
                found[-1] += 1
            case ops.AllGather() | ops.Prefetch():
                found.append(0)
            case _:
                pass
    return found


def starts(program: Program) -> dict[tuple[str, str, int], int]:
    """How many compute ops stand before each gather: by section, buffer and number of the buffer's life."""
    found: dict[tuple[str, str, int], int] = {}
    for section in program.sections:
        count = 0
        for op in section.body:
            count += isinstance(op, ops.Compute)
            if isinstance(op, ops.AllGather | ops.Prefetch) and section.name != UPDATE:
                for pair in op.pairs:
                    name = pair.destination.buffer
                    number = sum(key[:2] == (section.name, name) for key in found)
                    found[section.name, name, number] = count
    return found


choices = st.builds(
    Choice,
    case=st.builds(replace, cases(stages=(3,)), bucket=st.sampled_from([0, 4096])),
    overlap_update=st.booleans(),
    recompute=st.booleans(),
    part=st.floats(0, 1),
)


@pytest.mark.slow
@examples(25)
@given(choices)
def test_the_budget_holds_in_every_order(choice: Choice) -> None:
    late, least = scheduled(choice, None), scheduled(choice, 0)
    assert most_bytes(least) <= most_bytes_between(late)[1]
    case = choice.case
    flats = sum(flat.padded_numel * flat.dtype.itemsize_bytes for flat in case.logical().flats)
    budget = most_bytes(least) + round(choice.part * 2 * flats * case.world_size) - 512
    program = scheduled(choice, budget)
    assert most_bytes(program) <= max(budget, most_bytes(least))
    assert peak(program).total_bytes <= max(budget, peak(least).total_bytes)
    before, after = starts(late), starts(program)
    assert before.keys() == after.keys()
    assert all(after[key] <= before[key] for key in after)
    assert waits(program) <= waits(least) <= waits(late)
    assert max(waits_of_gathers(program)) <= 1
    assert collective_bytes(program) == collective_bytes(late)


@cache
def _lowered(budget: int) -> Program:
    return applied(mlp(blocks=4), for_stage(3, 4, budget=budget))


def test_more_memory_is_used_for_gathers_that_run_further_ahead() -> None:
    least = _lowered(0)
    body = least.section_by_name[LAST_MICRO_STEP].body
    assert not any(isinstance(op, ops.Prefetch) for op in body)
    assert max(happens.groups_live(body, least)) == 1
    one = least.buffer_by_name["blocks.1.full"].size_bytes
    live = [
        max(happens.groups_live(p.section_by_name[LAST_MICRO_STEP].body, p))
        for p in (_lowered(most_bytes(least) + count * one) for count in (1, 2, 8))
    ]
    assert live == sorted(live)
    assert live[0] >= 2
    assert live[0] < live[-1]


def test_without_a_limit_all_is_gathered_at_once() -> None:
    program = _lowered(1 << 40)
    body = program.section_by_name[LAST_MICRO_STEP].body
    first = next(i for i, op in enumerate(body) if isinstance(op, ops.Compute))
    # Nothing holds the first gathers back: neither ops before them nor each other.
    assert not any(isinstance(op, ops.Wait) and op.on == GATHER for op in body[:first])
    lives = happens.lives(body, program)
    assert len(lives) == 10
    # The first life of each flat at the beginning, the second one when the first has ended.
    seen: dict[str, int] = {}
    for life in lives:
        if life.buffer in seen:
            assert life.alloc > seen[life.buffer]
        else:
            assert life.gather < first
        seen[life.buffer] = life.release


@examples(3)
@given(cases(stages=(3,), world_sizes=(3, 3)), st.sampled_from([0, 1, 4]), st.integers(0, 2**16))
def test_numbers_are_the_same(case: Case, flats: int, schedule_seed: int) -> None:
    logical = case.logical()
    sizes = [flat.padded_numel * flat.dtype.itemsize_bytes for flat in logical.flats]
    budget = peak(case.scheduled()).total_bytes + flats * 3 * max(sizes)
    program = proved(logical, for_stage(3, 3, elide=case.elide, budget=budget))
    assert_same(program, applied(logical, case.passes()), case.micro_steps, [schedule_seed])


@pytest.mark.parametrize("budget", [0, 1 << 40])
def test_over_groups_of_ranks(budget: int) -> None:
    logical = mlp(blocks=2)
    program = proved(logical, for_stage(3, 4, replicas=2, budget=budget, unshard=("blocks.0",)))
    assert_same(program, applied(logical, for_stage(3, 4, replicas=2)), seeds=[3])


def test_options_and_specs() -> None:
    options = make_options({"world_size": 2, "prefetch_budget": "80GB"})
    (step,) = (step for step in for_options(options) if isinstance(step, PrefetchGathers))
    assert step == PrefetchGathers(budget=80_000_000_000)
    assert step.spec() == "prefetch{budget=80000000000}"
    assert parse_spec(step.spec()) == step
    with pytest.raises(UserError, match="--prefetch-budget is lots"):
        make_options({"prefetch_budget": "lots"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prefetch{budget=-1}", "The option `budget` of `prefetch` is a number of bytes"),
        ("prefetch{distance=2, budget=9}", "takes a distance, bytes or a budget, not distance"),
    ],
)
def test_a_wrong_budget_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_spec(spec)
