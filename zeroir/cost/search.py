"""The search for the best point of a space that is too large to try all of: coordinate descent, pruned by bounds.

A space is a few families, such as the meshes of a stage, each a grid of ordered axes. The evaluation of a point returns
the bytes that are missing until it fits, and its step time; a lower bound of the step is cheaper. A point that misses
fewer bytes is better, and of two that fit, the faster one.

The search of a family begins at its starts. From the first, the fastest, it gives up speed where that frees most memory
per time, until the point fits, and then improves one axis at a time as long as that helps. It does so for the most
promising family first, and for the others unless their bound excludes them. From the best points it then tries faster
ones that do not fit, and makes them fit along the other axes. Last, it improves the winner's other starts. It walks a
long axis in strides. It tries no point twice, and none whose bound is hardly better than the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

Point = tuple[int, ...]
"""An index for every axis of a family."""

_FEW: Final = 6
"""Of an axis with no more values than this, all are tried; otherwise both ends and those …, 16, 4, 1 away."""

_STRIDE: Final = 4
"""The ratio of a stride to the next shorter one."""

_CLOSE: Final = 1.1
"""A family is also improved by trading one axis for others if its step is at most this many times the best."""

_WORTH: Final = 1.01
"""A point is tried only if its bound allows it to be more than this many times as fast as the best so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A grid: the number of values of each axis, and initial points."""

    sizes: tuple[int, ...]
    starts: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """The result for a point: the missing and the needed bytes, and the step time if none were missing.

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
        """The sort key, lower is better: fewer missing bytes, then a shorter step, then fewer needed bytes."""
        return self.missing_bytes, self.step_ns, self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search: the best point of each family, and every point that was tried.

    ``best`` has one point for each family. ``winner`` is the family of the best of all. ``cut_off`` are those that were
    not improved, because their bound excludes them. ``is_finished`` is False if the search ended because enough
    points were tried.
    """

    best: tuple[Point, ...]
    winner: int
    cut_off: frozenset[int]
    tried: Mapping[tuple[int, Point], SearchOutcome]
    is_finished: bool


Evaluate = Callable[[int, Point], SearchOutcome]
Bound = Callable[[int, Point | None], int]
"""A lower bound of the step of a point, or of all points of a family, in nanoseconds."""


def search(
    families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, *, most_tried: int
) -> Found:
    """Return the best points that descent finds, trying at most ``most_tried``, but at least one of every family."""
    return _Search(families, evaluate, bound_ns, most_tried).run()


_Move = tuple[float, Point, int, int]
"""The cost of a move, the point at which it was evaluated, the axis, and the axis's new value."""


class _Search:
    def __init__(
        self, families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, most_tried: int
    ) -> None:
        self._families = families
        self._evaluate = evaluate
        self._bound_ns = bound_ns
        self._most_tried = most_tried
        self._tried: dict[tuple[int, Point], SearchOutcome] = {}
        self._floors_ns: dict[int, int] = {}
        self._best = [family.starts[0] for family in families]
        self._is_finished = True

    def run(self) -> Found:
        numbers = range(len(self._families))
        # One of every family, whatever the limit; only then may others of the same family use up the limit.
        for number, family in enumerate(self._families):
            self._tried[number, family.starts[0]] = self._evaluate(number, family.starts[0])
        for number, family in enumerate(self._families):
            if not self._best_of(number).is_hopeless:
                for point in family.starts[1:]:
                    self._try(number, point)
        cut_off: set[int] = set()
        for number in sorted(numbers, key=self._rank):
            if self._best_of(number).is_hopeless:
                continue
            if number != self._winner() and self._cannot_win(number):
                cut_off.add(number)
                continue
            self._squeeze(number, self._families[number].starts[0])
            self._climb(number, self._best[number])
        done: set[tuple[int, Point]] = set()
        is_thorough = False
        while True:
            close = [n for n in sorted(numbers, key=self._rank) if self._is_close(n)]
            todo = [n for n in close if (n, self._best[n]) not in done and n not in cut_off]
            if todo:
                done.add((todo[0], self._best[todo[0]]))
                self._trade(todo[0])
            elif is_thorough or self._best_of(self._winner()).is_hopeless:
                break
            else:
                is_thorough = True
                for start in self._families[self._winner()].starts:
                    self._climb(self._winner(), start)
        return Found(
            best=tuple(self._best),
            winner=self._winner(),
            cut_off=frozenset(cut_off),
            tried=self._tried,
            is_finished=self._is_finished,
        )

    def _try(self, number: int, point: Point) -> SearchOutcome | None:
        """Return the result for a point; None if it cannot be the family's best, or enough points were tried."""
        evaluation = self._tried.get((number, point))
        if evaluation is not None:
            return evaluation
        best = self._best_of(number)
        if best.fits and not self._is_worth(number, point, best.step_ns):
            return None
        if len(self._tried) >= self._most_tried:
            self._is_finished = False
            return None
        self._tried[number, point] = evaluation = self._evaluate(number, point)
        if evaluation.key < best.key:
            self._best[number] = point
        return evaluation

    def _squeeze(self, number: int, at: Point, kept: int | None = None) -> None:
        """From a point, give up speed where that frees most memory for its cost, until the point fits.

        The axis ``kept`` is not changed. The cost of a move is recomputed if other moves were made since.
        """
        moves: list[_Move] = []
        for axis in range(len(at)):
            if axis != kept and self._is_worth_fitting(number, at):
                self._weigh(number, at, axis, moves)
        while moves and self._is_worth_fitting(number, at):
            _, seen, axis, value = heappop(moves)
            if value == at[axis]:
                continue
            if seen != at:
                self._push(number, at, axis, value, moves)
                continue
            at = (*at[:axis], value, *at[axis + 1 :])
            self._weigh(number, at, axis, moves)

    def _is_worth_fitting(self, number: int, at: Point) -> bool:
        """Return whether a point does not fit but is faster than a best one that fits.

        Fitting never speeds it up much.
        """
        best, own = self._best_of(number), self._tried[number, at]
        return not own.fits and not (best.fits and own.step_ns >= best.step_ns)

    def _weigh(self, number: int, at: Point, axis: int, moves: list[_Move]) -> None:
        for point in self._along(number, axis, at):
            self._push(number, at, axis, point[axis], moves)

    def _push(self, number: int, at: Point, axis: int, value: int, moves: list[_Move]) -> None:
        """Add a move along an axis with its cost: the nanoseconds per missing byte that it frees."""
        present = self._tried[number, at]
        evaluation = self._try(number, (*at[:axis], value, *at[axis + 1 :]))
        if evaluation is not None and evaluation.missing_bytes < present.missing_bytes:
            freed_bytes = present.missing_bytes - evaluation.missing_bytes
            heappush(moves, ((evaluation.step_ns - present.step_ns) / freed_bytes, at, axis, value))

    def _climb(self, number: int, at: Point) -> None:
        """Improve a point along one axis at a time until no axis helps, the last axes first."""
        if (number, at) not in self._tried:
            return
        is_better = True
        while is_better:
            is_better = False
            for axis in reversed(range(len(at))):
                while (better := self._better(number, at, self._along(number, axis, at))) != at:
                    at, is_better = better, True

    def _better(self, number: int, at: Point, points: Iterator[Point]) -> Point:
        """Return the best of a point and others, all of which are tried."""
        best, key = at, self._tried[number, at].key
        for point in points:
            evaluation = self._try(number, point)
            if evaluation is not None and evaluation.key < key:
                best, key = point, evaluation.key
        return best

    def _trade(self, number: int) -> None:
        """From a family's best, try faster points that do not fit, and make them fit along the other axes."""
        at = self._best[number]
        for axis in range(len(at)):
            for point in self._along(number, axis, at):
                if self._try(number, point) is not None:
                    self._squeeze(number, point, axis)
        self._climb(number, self._best[number])

    def _along(self, number: int, axis: int, at: Point) -> Iterator[Point]:
        """Yield points that differ from one along an axis."""
        size = self._families[number].sizes[axis]
        if size <= _FEW:
            values = [value for value in range(size) if value != at[axis]]
        else:
            strides = [1]
            while strides[-1] * _STRIDE < size:
                strides.append(strides[-1] * _STRIDE)
            values = [0, size - 1, *(at[axis] + s * sign for s in strides for sign in (1, -1))]
            values = [v for v in dict.fromkeys(values) if 0 <= v < size and v != at[axis]]
        for value in values:
            yield (*at[:axis], value, *at[axis + 1 :])

    def _best_of(self, number: int) -> SearchOutcome:
        return self._tried[number, self._best[number]]

    def _rank(self, number: int) -> tuple[tuple[int, int, int], int]:
        return self._best_of(number).key, number

    def _winner(self) -> int:
        return min(range(len(self._families)), key=self._rank)

    def _cannot_win(self, number: int) -> bool:
        best = self._best_of(self._winner())
        return best.fits and self._family_ns(number) * _WORTH >= best.step_ns

    def _is_worth(self, number: int, point: Point, step_ns: int) -> bool:
        """Return whether the bounds of a point and of its family allow a step clearly shorter than ``step_ns``."""
        if self._family_ns(number) * _WORTH >= step_ns:
            return False
        return self._bound_ns(number, point) * _WORTH < step_ns

    def _family_ns(self, number: int) -> int:
        if number not in self._floors_ns:
            self._floors_ns[number] = self._bound_ns(number, None)
        return self._floors_ns[number]

    def _is_close(self, number: int) -> bool:
        own, best = self._best_of(number), self._best_of(self._winner())
        if number == self._winner():
            return not own.is_hopeless
        return own.fits and own.step_ns <= best.step_ns * _CLOSE
