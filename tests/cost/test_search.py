"""Laws of the search, on made-up spaces."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.cost.search import Family, Point, SearchOutcome, search

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[list[Family], dict[tuple[int, Point], SearchOutcome], int]:
    """Families with the outcome of every point, and a bound that none falls below."""
    families: list[Family] = []
    table: dict[tuple[int, Point], SearchOutcome] = {}
    for number in range(draw(st.integers(1, 3))):
        sizes = tuple(draw(SIZES))
        seed = draw(st.integers(0, 2**32))
        points = list(itertools.product(*map(range, sizes)))
        starts = tuple(dict.fromkeys(draw(st.lists(st.sampled_from(points), min_size=1))))
        families.append(Family(sizes=sizes, starts=starts))
        for point in points:
            digest = hash((seed, point)) & 0xFFFF
            missing = max(0, digest % 97 - 50)
            table[number, point] = SearchOutcome(
                missing_bytes=missing, needed_bytes=digest % 97, step_ns=100 + digest % 50
            )
    return families, table, draw(st.integers(1, 400))


def neighbours(families: Sequence[Family], number: int, point: Point) -> list[tuple[int, Point]]:
    return [
        (number, (*point[:axis], value, *point[axis + 1 :]))
        for axis, size in enumerate(families[number].sizes)
        for value in (point[axis] - 1, point[axis] + 1)
        if 0 <= value < size
    ]


@examples(100)
@given(spaces())
def test_a_search_tries_nothing_twice_and_keeps_the_best_that_it_tried(
    space: tuple[list[Family], dict[tuple[int, Point], SearchOutcome], int],
) -> None:
    families, table, most_tried = space
    asked: Counter[tuple[int, Point]] = Counter()

    def evaluate(number: int, point: Point) -> SearchOutcome:
        asked[number, point] += 1
        return table[number, point]

    result = search(families, evaluate, lambda *_: 100, most_tried=most_tried)
    assert max(asked.values()) == 1
    assert len(asked) <= max(most_tried, len(families))
    assert dict(result.tried) == {key: table[key] for key in asked}
    keys = {key: outcome.key for key, outcome in result.tried.items()}
    assert keys[result.winner, result.best[result.winner]] == min(keys.values())
    for number, point in enumerate(result.best):
        assert keys[number, point] == min(key for (of, _), key in keys.items() if of == number)


@examples(100)
@given(spaces())
def test_no_neighbour_of_what_a_finished_search_finds_is_better(
    space: tuple[list[Family], dict[tuple[int, Point], SearchOutcome], int],
) -> None:
    families, table, _ = space
    result = search(families, lambda *key: table[key], lambda *_: 0, most_tried=10**6)
    assert result.is_finished
    best = table[result.winner, result.best[result.winner]]
    for key in neighbours(families, result.winner, result.best[result.winner]):
        assert table[key].key >= best.key


@examples(100)
@given(spaces(), st.data())
def test_a_bound_spares_work_and_loses_hardly_anything(
    space: tuple[list[Family], dict[tuple[int, Point], SearchOutcome], int], data: st.DataObject
) -> None:
    """With bounds that hold, families that are cut off have nothing that is a hundredth faster."""
    families, table, _ = space
    slack = data.draw(st.integers(0, 20))

    def bound_ns(number: int, point: Point | None) -> int:
        points = [point] if point is not None else [p for of, p in table if of == number]
        return min(table[number, p].step_ns for p in points) - slack

    result = search(families, lambda *key: table[key], bound_ns, most_tried=10**6)
    best = table[result.winner, result.best[result.winner]]
    for number in result.cut_off:
        fitting = [o.step_ns for (of, _), o in table.items() if of == number and o.fits]
        assert all(1.01 * step_ns >= best.step_ns for step_ns in fitting)


def test_one_axis_is_traded_for_another() -> None:
    """Two axes save the same memory; descent alone spends it on the first, the second is worth more."""
    family = Family(sizes=(4, 4), starts=((0, 0),))

    def evaluate(_: int, point: Point) -> SearchOutcome:
        needed = sum(point)
        missing = max(0, needed - 3)
        step_ns = 0 if missing else 100 - 5 * point[0] - 9 * point[1]
        return SearchOutcome(missing_bytes=missing, needed_bytes=needed, step_ns=step_ns)

    result = search([family], evaluate, lambda *_: 0, most_tried=100)
    assert result.best == ((0, 3),)


def test_what_can_hardly_be_better_is_not_tried() -> None:
    family = Family(sizes=(5,), starts=((2,),))
    for step_ns, is_enough in ((1010, True), (1011, False)):
        outcome = SearchOutcome(missing_bytes=0, needed_bytes=1, step_ns=step_ns)
        result = search(
            [family], lambda *_, answer=outcome: answer, lambda *_: 1000, most_tried=100
        )
        assert (len(result.tried) == 1) is is_enough
        assert result.is_finished
