"""Ranks that do different things end with a sentence that says which rank did what, long before the timeout."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.support import Ranks
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, MICRO_STEP, SAVE, UPDATE
from zeroir.runtime.distributed.section_history import (
    BATCHES,
    CHANGED_CODE,
    SectionEntry,
    SectionHistory,
    decoded,
    difference,
)

TAKEN = "took micro-step 2 of step 3"
MORE = f"{TAKEN}, with more to follow"
LAST = f"{TAKEN} as the last of the step"


def history(entries: list[SectionEntry]) -> SectionHistory:
    made = SectionHistory()
    for entry in entries:
        made.add(entry)
    return made


def differing(*histories: list[SectionEntry]) -> str | None:
    return difference({rank: decoded(history(own).encoded()) for rank, own in enumerate(histories)})


def steps(counts: list[int]) -> list[SectionEntry]:
    """What a rank does that takes these numbers of micro-steps, and evaluates after each step."""
    return [
        entry
        for step, count in enumerate(counts, 1)
        for entry in (
            *(SectionEntry(MICRO_STEP, step, number) for number in range(1, count)),
            SectionEntry(LAST_MICRO_STEP, step, count),
            SectionEntry(UPDATE, step, count),
            SectionEntry(EVALUATE, step + 1, 0),
        )
    ]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=200), st.integers(0, 900), st.integers(1, 30)
)
def test_ranks_that_do_the_same_never_differ(counts: list[int], lag: int, ranks: int) -> None:
    """However far one is behind, and whatever the histories have forgotten."""
    entries = steps(counts)
    behind = entries[: max(0, len(entries) - lag)]
    assert differing(*[entries] * ranks, behind) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=200), st.integers(1, 4), st.data())
def test_another_number_of_micro_steps_is_found(
    counts: list[int], other: int, data: st.DataObject
) -> None:
    step = len(counts)
    odd = data.draw(st.integers(0, 3))
    if other == counts[-1]:
        other += 1
    histories = [steps(counts) for _ in range(4)]
    histories[odd] = steps([*counts[:-1], other])
    sentence = differing(*histories)
    assert sentence is not None
    fewer = min(other, counts[-1])
    assert f"took micro-step {fewer} of step {step} as the last of the step" in sentence
    assert f"took micro-step {fewer} of step {step}, with more to follow" in sentence
    assert f"rank {odd} " in sentence


def test_a_batch_that_is_tried_again_is_one_micro_step() -> None:
    tried = [
        SectionEntry(LAST_MICRO_STEP, 1, 1),
        SectionEntry(LAST_MICRO_STEP, 1, 1),
        SectionEntry(UPDATE, 1, 1),
    ]
    assert differing(tried, [tried[0], tried[2]]) is None
    twice = [SectionEntry(EVALUATE, 1, 0), SectionEntry(EVALUATE, 1, 0), SectionEntry(SAVE, 1, 0)]
    sentence = differing(twice, twice[1:])
    assert sentence is not None
    assert "rank 0 evaluated before step 1, but rank 1 saved before the end of step 1." in sentence
    with_sizes = [SectionEntry(BATCHES, 1, 0), tried[0]]
    assert differing([*with_sizes, *with_sizes, tried[2]], [*with_sizes, tried[2]]) is None


def test_ranks_that_compile_again_may_have_found_different_changes() -> None:
    changes = [[SectionEntry(CHANGED_CODE, 2, 0, f"tau is {tau} now")] for tau in (1.0, 2.0)]
    assert differing(*changes) is None
    sentence = differing(*changes, [SectionEntry(BATCHES, 2, 0)])
    assert sentence is not None
    assert "ranks 0, 1 began to compile again in step 2 (tau is 1.0 now), but rank 2" in sentence


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "what", "stage", "backend", "did"),
    [
        (3, "micro-steps", 3, "peer-memory", (f"ranks 0, 2 {LAST}, but rank 1 {MORE}.",)),
        (4, "micro-steps", 2, "gloo", (f"ranks 0, 2, 3 {LAST}, but rank 1 {MORE}.",)),
        (3, "evaluate", 3, "gloo", ("ranks 0, 2 took micro-step 1", "but rank 1 evaluated before")),
        (
            2,
            "program",
            3,
            "peer-memory",
            ("rank 0 took micro-step 1", "rank 1 went on with another"),
        ),
        (
            3,
            "change",
            3,
            "peer-memory",
            (
                "ranks 0, 2 took micro-step 1 of step 3",
                "rank 1 began to compile again in step 3 (",
                "'gain'",
                "2.0 now",
            ),
        ),
        # The micro-steps of these stages have no collective, so nobody waits.
        (
            4,
            "micro-steps",
            1,
            "peer-memory",
            ("Rank 1 took 9 micro-steps until the end of step 4",),
        ),
        (3, "micro-steps", 0, "gloo", ("Rank 1 took 9 micro-steps until the end of step 4",)),
    ],
)
def test_ranks_that_do_different_things(
    tmp_path: Path, world_size: int, what: str, stage: int, backend: str, did: tuple[str, ...]
) -> None:
    start = time.monotonic()
    module = "tests.runtime.differing_workers"
    arguments = (what, str(stage), backend)
    ranks = Ranks(world_size, tmp_path, *arguments, module=module)
    results = ranks.wait(110)
    assert {code for code, _, _ in results} == {2}
    sentences = [line for _, _, err in results for line in err.splitlines()]
    assert any(all(part in line for part in did) for line in sentences), sentences
    assert time.monotonic() - start < 110  # the ranks would wait for 120 s
