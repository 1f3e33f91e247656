"""Buffers that share memory never live at once, whatever the streams do, and little memory is lost between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import networkx
import pytest
from hypothesis import example, given

from tests.passes.happens import before
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tools.bench_placement import layers, scattered
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program, Section
from zeroir.ir.text import parse
from zeroir.memory.curve import peak
from zeroir.memory.first_fit import BuffersToPlace, find_offsets
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.memory.placement import (
    ALIGNMENT_BYTES,
    Placement,
    place_all,
    placements_with_bound,
    rounded,
    unplaced,
)
from zeroir.passes import manager
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.verify.context import Findings
from zeroir.verify.order.arenas import check_arenas


def lives(section: Section) -> dict[str, list[tuple[int | None, int | None]]]:
    """The ops that begin and end each life of each buffer; None at the section's ends."""
    found: dict[str, list[tuple[int | None, int | None]]] = {}
    for name in section.entry.live:
        found[name] = [(None, None)]
    for index, op in enumerate(section.body):
        match op:
            case ops.Alloc():
                found.setdefault(op.buffer, []).append((index, None))
            case ops.Release():
                first, _ = found[op.buffer][-1]
                found[op.buffer][-1] = (first, index)
            case _:
                pass
    return found


def meetings(program: Program, placement: Placement) -> Iterator[tuple[str, str]]:
    """Pairs of buffers that share a byte though neither life surely ends before the other begins."""
    size = {b.name: b.size_bytes for b in program.buffers}
    for section in program.sections:
        masks = before(section.body)
        found = lives(section)
        names = sorted(found.keys() & placement.offsets.keys())
        for at, one in enumerate(names):
            for other in names[at + 1 :]:
                start, start2 = placement.offsets[one], placement.offsets[other]
                if start + size[one] <= start2 or start2 + size[other] <= start:
                    continue
                for a in found[one]:
                    for b in found[other]:
                        if not (is_over(a, b, masks) or is_over(b, a, masks)):
                            yield one, other


def is_over(
    first: tuple[int | None, int | None], second: tuple[int | None, int | None], masks: list[int]
) -> bool:
    """Whether the first life has surely ended when the second begins."""
    end, begin = first[1], second[0]
    return end is not None and begin is not None and bool(masks[begin] >> end & 1)


@given(cases())
@examples(40)
def test_no_two_buffers_that_may_be_live_at_once_overlap(case: Case) -> None:
    program = case.scheduled()
    for placed in (place_all(program), place_all(program, is_searched=False)):
        for space, placement in placed.items():
            assert not list(meetings(program, placement))
            assert all(
                offset % ALIGNMENT_BYTES[space] == 0 for offset in placement.offsets.values()
            )


@given(cases())
@examples(20)
def test_nor_where_long_lives_are_stacked(case: Case) -> None:
    """As in a program of many buffers; here those that meet the most others are stacked in any case."""
    program = case.scheduled()
    lifetimes = Lifetimes.of(program)
    sizes = {b.name: rounded(b.size_bytes, b.space) for b in program.buffers}
    of_lives = [sizes[name] for name in lifetimes.buffers]
    here = [life for life, name in enumerate(lifetimes.buffers) if is_on_device(program, name)]
    for most_pairs in (0, 2 * len(here)):
        buffers = BuffersToPlace.of(lifetimes, here, of_lives, most_pairs)
        assert most_pairs or (buffers.stacked >= 0).any()
        offsets = find_offsets(buffers, 0, most_placements=100)
        placement = Placement(
            offsets=dict(zip(buffers.names, offsets.tolist(), strict=True)),
            size_bytes=int((offsets + buffers.sizes).max()),
        )
        assert (offsets >= 0).all()
        assert not list(meetings(program, placement))


def is_on_device(program: Program, name: str) -> bool:
    return program.buffer_by_name[name].space is Space.DEVICE


@given(cases())
@examples(10)
def test_the_same_places_are_found_again(case: Case) -> None:
    program = case.scheduled()
    assert place_all(program) == place_all(program)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_is_never_worse_than_the_first_that_is_found(seed: int) -> None:
    program = scattered(120, seed)
    first, searched = (place_all(program, is_searched=flag)[Space.DEVICE] for flag in (False, True))
    assert searched.live_bytes <= searched.size_bytes <= first.size_bytes
    assert searched.gap <= 0.03


def test_the_judge_sees_an_overlap() -> None:
    program = manager.run(mlp(blocks=4), for_stage(3, 2))
    (placement,) = place_all(program).values()
    offsets = dict.fromkeys(placement.offsets, 0)
    assert list(meetings(program, Placement(offsets=offsets, size_bytes=placement.size_bytes)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_little_more_is_taken_than_is_live_at_the_fullest_moment(stage: int) -> None:
    program = manager.run(mlp(blocks=12, dim=64, batch=64), for_stage(stage, 2))
    placement = place_all(program)[Space.DEVICE]
    resting = sum(
        b.size_bytes for b in program.buffers if b.is_persistent and b.space is Space.DEVICE
    )
    in_program_order = peak(program).total_bytes - resting
    assert in_program_order <= placement.live_bytes <= placement.size_bytes
    assert 0 <= placement.gap <= 0.03


def judged(section: Section, names: set[str]) -> tuple[list[str], list[list[bool]]]:
    """The buffer of every life, and which pairs of lives may meet, by the judge of order."""
    masks = before(section.body)
    found = [(name, life) for name, of in lives(section).items() if name in names for life in of]
    meet = [
        [not (is_over(a, b, masks) or is_over(b, a, masks)) for _, b in found] for _, a in found
    ]
    return [name for name, _ in found], meet


@given(cases())
@example(  # Many lives begin when nearly as much may be live as at the fullest moment.
    Case(
        blocks=3,
        dim=8,
        precision="fp32",
        optimizer="sgd",
        micro_steps=2,
        clip=None,
        tied=False,
        keep_fp32=True,
        stage=3,
        world_size=1,
        elide=False,
        distance=0,
        live=3,
        bucket=0,
    )
)
@examples(25)
def test_what_is_most_live_is_what_some_order_of_ops_makes_live(case: Case) -> None:
    """Against a search through all cliques of lives that may meet."""
    program = case.scheduled()
    sizes = {b.name: b.size_bytes for b in program.buffers if not b.is_persistent}
    most = 0
    for section in program.sections:
        names, meet = judged(section, set(sizes))
        graph = networkx.Graph()
        graph.add_nodes_from((i, {"weight": sizes[name]}) for i, name in enumerate(names))
        graph.add_edges_from((i, j) for i in graph for j in graph if i < j and meet[i][j])
        most = max(most, networkx.max_weight_clique(graph, weight="weight")[1] if names else 0)
    found = Lifetimes.of(program)
    result = most_live(found, range(len(found.buffers)), [sizes[name] for name in found.buffers])
    assert result.size_bytes <= most <= result.bound_bytes
    assert not any(found.is_before(i, j) for i in result.lives for j in result.lives if i < j)
    assert result.is_exact


def test_a_cut_finds_the_heaviest_of_lives_that_exclude_each_other() -> None:
    """The gather stream does not know that %a is over; compute does, so %a and %b never meet, but each meets %c."""
    text = """zeroir 1
mesh dp=1
streams compute:device gather:device
buffer %a : f32[300] device activation
buffer %b : f32[200] device activation
buffer %c : f32[100] device activation

section evaluate {
  alloc %a  stream=compute
  release %a  stream=compute
  alloc %b  stream=compute
  alloc %c  stream=gather
  release %b  stream=compute
  release %c  stream=gather
}
"""
    found = Lifetimes.of(parse(text))
    result = most_live(found, range(3), [1200, 800, 400])
    assert result.is_exact
    assert (result.size_bytes, sorted(result.lives)) == (1600, [0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("make", [layers, scattered])
def test_many_buffers_are_placed_soon_and_tightly(make: Callable[[int, int], Program]) -> None:
    program = make(10_000, 1)
    placement = place_all(program)[Space.DEVICE]
    assert placement.gap <= 0.03
    buffers = tuple(
        b if b.is_persistent else replace(b, offset=placement.offsets[b.name])
        for b in program.buffers
    )
    findings = Findings(replace(program, buffers=buffers))
    check_arenas(findings.program, findings)
    assert not findings.items


def test_a_plan_is_compared_with_what_can_be_live_at_once() -> None:
    program = manager.run(mlp(blocks=3), for_stage(3, 3))
    planned, found = (placements_with_bound(one) for one in (plan(program), program))
    assert planned == found == place_all(program)
    assert 0 < planned[Space.DEVICE].live_bytes <= planned[Space.DEVICE].size_bytes
    least = {space: one.size_bytes for space, one in unplaced(program).items()}
    assert least == {space: one.live_bytes for space, one in planned.items()}


def plan(program: Program) -> Program:
    return manager.run(program, (PlanMemory(),))
