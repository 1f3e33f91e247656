"""The step function under long lives, against an array with a number for each moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.memory.skyline import Skyline, highest

STOP = 24


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Up to three, in the order of their beginnings; they may touch and overlap."""
    found = draw(
        st.lists(st.tuples(st.integers(0, STOP - 1), st.integers(1, 9)), min_size=1, max_size=3)
    )
    return sorted((first, min(first + length, STOP)) for first, length in found)


@given(st.lists(st.tuples(windows(), st.integers(1, 3)), max_size=30))
@examples(200)
def test_what_is_level_is_raised_and_nothing_else(
    raised: list[tuple[list[tuple[int, int]], int]],
) -> None:
    skyline, heights = Skyline(STOP), np.zeros(STOP, dtype=np.int64)
    for ranges, size in raised:
        covered = np.zeros(STOP, dtype=bool)
        for first, stop in ranges:
            covered[first:stop] = True
        (base, *others) = np.unique(heights[covered]).tolist()
        expected = None if others else base
        assert skyline.raise_level(ranges, size) == expected
        if expected is not None:
            heights[covered] += size
        assert skyline.heights().tolist() == heights.tolist()


@given(st.lists(st.integers(0, 50), min_size=STOP, max_size=STOP), st.lists(windows(), max_size=5))
@examples(100)
def test_the_highest_in_a_window(heights: list[int], drawn: list[list[tuple[int, int]]]) -> None:
    ranges = [window for of in drawn for window in of]
    firsts = np.array([first for first, _ in ranges], dtype=np.int64)
    stops = np.array([stop for _, stop in ranges], dtype=np.int64)
    found = highest(np.array(heights), firsts, stops)
    assert found.tolist() == [max(heights[first:stop]) for first, stop in ranges]
