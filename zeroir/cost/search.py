"""The search for the best point of a space that is too large to try all of: descent by axes, cut off by bounds.

A space is a few families, such as the meshes of a stage, each a grid of ordered axes. Of a point one can ask what is
missing until it fits, and the step it takes; and more cheaply a bound that its step does not fall below. What misses
less is better, and of what fits, what is faster.

Every family is looked at from its starts. From the fastest of them, the first, speed is given up where it frees most
memory for its time, until the rest fits, and that is improved along one axis at a time as long as it helps: the most
promising family first, the others unless their bound says that they cannot win. The best are then changed to what is
faster and does not fit, which is paid for along the other axes. At last the winner is looked for from its other starts.
A long axis is walked in strides. Nothing is tried twice, and nothing that by its bound is hardly better than what is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

Point = tuple[int, ...]
"""An index for every axis of a family."""

_FEW: Final = 6
"""Of an axis with no more values than this, all are tried; else both ends and those …, 16, 4, 1 away."""

_STRIDE: Final = 4
"""How many times the next shorter stride a stride is."""

_CLOSE: Final = 1.1
"""Families within so much of the best are improved by trading one axis for others, too."""

_WORTH: Final = 1.01
"""What by its bound cannot be so many times as fast as what is known is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A grid: the number of values of each axis, and points to begin with."""

    sizes: tuple[int, ...]
    starts: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a point comes to: the bytes that are missing, those that it needs, and its step, were none missing.

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
    tried: Mapping[tuple[int, Point], Evaluation]
    is_finished: bool


Evaluate = Callable[[int, Point], Evaluation]
Bound = Callable[[int, Point | None], int]
"""What the step of a point, or of all points of a family, does not fall below."""


def search(
    families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, *, most_tried: int
) -> Found:
    """The best points that descent finds, trying at most ``most_tried``, but at least one of every family."""
    return _Search(families, evaluate, bound_ns, most_tried).run()


_Move = tuple[float, Point, int, int]
"""What a move costs, from where that was looked at, and the axis and its new value."""


class _Search:
    def __init__(
        self, families: Sequence[Family], evaluate: Evaluate, bound_ns: Bound, most_tried: int
    ) -> None:
        self._families = families
        self._evaluate = evaluate
        self._bound_ns = bound_ns
        self._most_tried = most_tried
        self._tried: dict[tuple[int, Point], Evaluation] = {}
        self._floors_ns: dict[int, int] = {}
        self._best = [family.starts[0] for family in families]
        self._is_finished = True

    def run(self) -> Found:
        numbers = range(len(self._families))
        # One of every family, whatever the limit; only then may others of the same family take from it.
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

    def _try(self, number: int, point: Point) -> Evaluation | None:
        """What a point comes to; None where it cannot be the family's best, or enough was tried."""
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
        """From a point give up speed where that frees most memory for it, but not along one axis, until the rest fits.

        What a move is worth is remembered while others are made, and looked at again before it is made itself.
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
        """Whether a point does not fit, and is not slower than what does: to make it fit will hardly make it faster."""
        best, own = self._best_of(number), self._tried[number, at]
        return not own.fits and not (best.fits and own.step_ns >= best.step_ns)

    def _weigh(self, number: int, at: Point, axis: int, moves: list[_Move]) -> None:
        for point in self._along(number, axis, at):
            self._push(number, at, axis, point[axis], moves)

    def _push(self, number: int, at: Point, axis: int, value: int, moves: list[_Move]) -> None:
        """Weigh a move along an axis: the time that it costs for each byte of those that are missing."""
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
        """The best of a point and others, all of which are tried."""
        best, key = at, self._tried[number, at].key
        for point in points:
            evaluation = self._try(number, point)
            if evaluation is not None and evaluation.key < key:
                best, key = point, evaluation.key
        return best

    def _trade(self, number: int) -> None:
        """From a family's best take what is faster though it does not fit, and pay for it along the other axes."""
        at = self._best[number]
        for axis in range(len(at)):
            for point in self._along(number, axis, at):
                if self._try(number, point) is not None:
                    self._squeeze(number, point, axis)
        self._climb(number, self._best[number])

    def _along(self, number: int, axis: int, at: Point) -> Iterator[Point]:
        """Points that differ from one along an axis."""
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

    def _best_of(self, number: int) -> Evaluation:
        return self._tried[number, self._best[number]]

    def _rank(self, number: int) -> tuple[tuple[int, int, int], int]:
        return self._best_of(number).key, number

    def _winner(self) -> int:
        return min(range(len(self._families)), key=self._rank)

    def _cannot_win(self, number: int) -> bool:
        best = self._best_of(self._winner())
        return best.fits and self._family_ns(number) * _WORTH >= best.step_ns

    def _is_worth(self, number: int, point: Point, step_ns: int) -> bool:
        """Whether a point, and any point of its family, may take clearly less than so long."""
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
