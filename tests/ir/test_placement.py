"""Buffers that share memory never live at once, whatever the streams do, and little memory is lost between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.passes.happens import before
from tests.passes.strategies import Case, cases
from tests.support.programs import mlp
from zeroir.ir import memory, ops
from zeroir.ir.buffers import Space
from zeroir.ir.placement import ALIGNMENT_BYTES, Placement, place_all
from zeroir.ir.program import Program, Section
from zeroir.passes import manager
from zeroir.passes.pipelines import for_stage


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
@settings(max_examples=40, deadline=None)
def test_no_two_buffers_that_may_be_live_at_once_overlap(case: Case) -> None:
    program = case.scheduled()
    for placement in place_all(program).values():
        assert not list(meetings(program, placement))
        assert all(offset % ALIGNMENT_BYTES == 0 for offset in placement.offsets.values())


def test_the_judge_sees_an_overlap() -> None:
    program = manager.run(mlp(blocks=4), for_stage(3, 2))
    (placement,) = place_all(program).values()
    offsets = dict.fromkeys(placement.offsets, 0)
    assert list(meetings(program, Placement(offsets=offsets, size_bytes=placement.size_bytes)))


@pytest.mark.parametrize("stage", range(4))
def test_little_more_is_taken_than_is_live_at_the_fullest_moment(stage: int) -> None:
    """The bound counts ops in program order; the placement allows for streams that lag."""
    program = manager.run(mlp(blocks=12, dim=64, batch=64), for_stage(stage, 2))
    placement = place_all(program)[Space.DEVICE]
    resting = sum(
        b.size_bytes for b in program.buffers if b.is_persistent and b.space is Space.DEVICE
    )
    live_bytes = memory.peak(program).total_bytes - resting
    assert live_bytes <= placement.size_bytes <= 1.1 * live_bytes
