"""The search for the best point of a space that is too large to try all of: descent by axes, cut off by bounds.

A space is a few families, such as the meshes of a stage, each a grid of ordered axes. Of a point one can ask what is
missing until it fits, and the step it takes; and more cheaply a bound that its step does not fall below. What misses
less is better, and of what fits, what is faster.

Every family is looked at from its starts. The most promising one is then improved from each of them, along one axis at
a time, as long as that helps, in one order of the axes and in the opposite one. The others follow, unless their bound
says that they cannot win. At last the best are improved along two axes at once, which trades one for another. Nothing
is tried twice, and nothing whose bound is no better than what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Point = tuple[int, ...]
"""An index for every axis of a family."""

_FEW: Final = 6
"""Of an axis with no more values than this, all are tried; else those 1, 2, 4, … away, and both ends."""

_CLOSE: Final = 1.1
"""Families within so much of the best are improved by two axes at once, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A grid: the number of values of each axis, and points to begin with."""

    sizes: tuple[int, ...]
    starts: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a point comes to: the bytes that are missing, those that it needs, and the step where none are missing.

    ``is_hopeless`` says that no point of the family fits.
    """

    missing_bytes: int
    needed_bytes: int
    step_ns: int = 0
    is_hopeless: bool = False

    @property
    def fits(self) -> bool:
        """Whether nothing is missing."""
        return self.missing_bytes == 0

    @property
    def key(self) -> tuple[int, int, int]:
        """The lower, the better: of what is equally fast, what needs less."""
        return self.missing_bytes, self.step_ns, self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: the best point of each family, and all that was tried.

    ``best`` are as many as there are families. ``winner`` is the family of the best of all. ``cut_off`` are those that
    were not improved, because their bound says that they cannot win. ``is_finished`` is false where the search ended
    because enough was tried.
    """

    best: tuple[Point, ...]
    winner: int
    cut_off: frozenset[int]
    tried: Mapping[tuple[int, Point], Outcome]
    is_finished: bool


Evaluate = Callable[[int, Point], Outcome]
Bound = Callable[[int, Point | None], int]
"""What the step of a point, or of all points of a family, does not fall below."""


def search(
    families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, *, most_tried: int
) -> Found:
    """The best points that descent finds, trying at most ``most_tried``, but at least one of every family."""
    return _Search(families, evaluate, bound_ns, most_tried).run()


class _Search:
    def __init__(
        self, families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, most_tried: int
    ) -> None:
        self._families = families
        self._evaluate = evaluate
        self._bound_ns = bound_ns
        self._most_tried = most_tried
        self._tried: dict[tuple[int, Point], Outcome] = {}
        self._best = [family.starts[0] for family in families]
        self._is_finished = True

    def run(self) -> Found:
        numbers = range(len(self._families))
        # One of every family, whatever the limit; only then may others of the same family take from it.
        for number, family in enumerate(self._families):
            self._tried[number, family.starts[0]] = self._evaluate(number, family.starts[0])
        for number, family in enumerate(self._families):
            if not self._outcome(number).is_hopeless:
                for point in family.starts[1:]:
                    self._try(number, point)
        cut_off: set[int] = set()
        for number in sorted(numbers, key=self._rank):
            known = self._outcome(number)
            if known.is_hopeless:
                continue
            if number != self._winner() and self._cannot_win(number):
                cut_off.add(number)
                continue
            axes = tuple(range(len(self._families[number].sizes)))
            self._descend(number, (axes, axes[::-1]))
        done: set[tuple[int, Point]] = set()
        while True:
            close = [n for n in sorted(numbers, key=self._rank) if self._is_close(n)]
            todo = [n for n in close if (n, self._best[n]) not in done and n not in cut_off]
            if not todo:
                break
            done.add((todo[0], self._best[todo[0]]))
            self._trade(todo[0])
        return Found(
            best=tuple(self._best),
            winner=self._winner(),
            cut_off=frozenset(cut_off),
            tried=self._tried,
            is_finished=self._is_finished,
        )

    def _try(self, number: int, point: Point) -> Outcome | None:
        """What a point comes to; None where it cannot be the family's best, or enough was tried."""
        outcome = self._tried.get((number, point))
        if outcome is not None:
            return outcome
        known = self._outcome(number)
        if known.fits and self._bound_ns(number, point) >= known.step_ns:
            return None
        if len(self._tried) >= self._most_tried:
            self._is_finished = False
            return None
        self._tried[number, point] = outcome = self._evaluate(number, point)
        if outcome.key < known.key:
            self._best[number] = point
        return outcome

    def _descend(self, number: int, orders: Sequence[Sequence[int]]) -> None:
        """Improve each start of a family, the axes in each of the orders: who comes first gets most of the memory."""
        for start in self._families[number].starts:
            for axes in orders:
                if (number, start) in self._tried:
                    self._climb(number, start, axes)

    def _climb(self, number: int, at: Point, axes: Sequence[int]) -> None:
        """Improve a point along one axis at a time until no axis helps."""
        is_better = True
        while is_better:
            is_better = False
            for axis in axes:
                while (better := self._better(number, at, self._along(number, axis, at))) != at:
                    at, is_better = better, True

    def _better(self, number: int, at: Point, points: Iterator[Point]) -> Point:
        """The best of a point and others, all of which are tried."""
        best, key = at, self._tried[number, at].key
        for point in points:
            outcome = self._try(number, point)
            if outcome is not None and outcome.key < key:
                best, key = point, outcome.key
        return best

    def _trade(self, number: int) -> None:
        """Improve a family's best along two axes at once, and then along each again, until nothing helps."""
        axes = range(len(self._families[number].sizes))
        for first in axes:
            for second in axes[first + 1 :]:
                at = self._best[number]
                both = (
                    point
                    for one in self._along(number, first, at)
                    for point in self._along(number, second, one)
                )
                self._climb(number, self._better(number, at, both), axes)

    def _along(self, number: int, axis: int, at: Point) -> Iterator[Point]:
        """Points that differ from one along an axis."""
        size = self._families[number].sizes[axis]
        if size <= _FEW:
            values = [value for value in range(size) if value != at[axis]]
        else:
            steps = [sign << power for power in range(size.bit_length()) for sign in (1, -1)]
            values = [at[axis] + step for step in steps] + [0, size - 1]
            values = [v for v in dict.fromkeys(values) if 0 <= v < size and v != at[axis]]
        for value in values:
            yield (*at[:axis], value, *at[axis + 1 :])

    def _outcome(self, number: int) -> Outcome:
        return self._tried[number, self._best[number]]

    def _rank(self, number: int) -> tuple[tuple[int, int, int], int]:
        return self._outcome(number).key, number

    def _winner(self) -> int:
        return min(range(len(self._families)), key=self._rank)

    def _cannot_win(self, number: int) -> bool:
        best = self._outcome(self._winner())
        return best.fits and self._bound_ns(number, None) >= best.step_ns

    def _is_close(self, number: int) -> bool:
        own, best = self._outcome(number), self._outcome(self._winner())
        if number == self._winner():
            return not own.is_hopeless
        return own.fits and own.step_ns <= best.step_ns * _CLOSE
