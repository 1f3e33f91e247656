"""Rules of replacement for pages in a memory of a fixed number of frames: an independent judge of planned paging.

Nothing here knows of programs or passes: a rule sees a sequence of accesses, page after page, and decides at each miss
which page leaves. Every access changes its page, as an optimizer's step does, so a page that leaves is written back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

Page = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The pages that came in and those that left, in order, one entry for each time."""

    came_in: Sequence[Page]
    left: Sequence[Page]


Rule = Callable[[Sequence[Page], int], Moved]
"""A rule's moves for a sequence of accesses and a number of frames, which are empty at first."""


def lru(accesses: Sequence[Page], frames: int) -> Moved:
    """The page leaves whose last use is longest ago."""
    last_use: dict[Page, int] = {}

    def victim(held: set[Page], _: int) -> Page:
        return min(held, key=last_use.__getitem__)

    def note(page: Page, at: int) -> None:
        last_use[page] = at

    return _moved(accesses, frames, victim, note)


def belady(accesses: Sequence[Page], frames: int) -> Moved:
    """The page leaves whose next use is furthest: no rule has fewer misses (Belady 1966; Mattson et al. 1970)."""
    uses: dict[Page, list[int]] = {}
    for at, page in enumerate(accesses):
        uses.setdefault(page, []).append(at)

    def next_use(page: Page, at: int) -> float:
        later = bisect_right(uses[page], at)
        return uses[page][later] if later < len(uses[page]) else _NEVER

    def victim(held: set[Page], at: int) -> Page:
        return max(held, key=lambda page: next_use(page, at))

    return _moved(accesses, frames, victim, lambda _page, _at: None)


_NEVER: Final = float("inf")


def _moved(
    accesses: Sequence[Page],
    frames: int,
    victim: Callable[[set[Page], int], Page],
    note: Callable[[Page, int], None],
) -> Moved:
    """The moves of demand paging: a page comes in when it is used, and stays until another needs its frame."""
    held: set[Page] = set()
    came_in: list[Page] = []
    left: list[Page] = []
    for at, page in enumerate(accesses):
        if page not in held:
            came_in.append(page)
            if frames and len(held) == frames:
                leaving = victim(held, at)
                held.remove(leaving)
                left.append(leaving)
            if frames:
                held.add(page)
            else:
                left.append(page)
        note(page, at)
    return Moved(came_in=came_in, left=left)
