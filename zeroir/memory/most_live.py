"""The most bytes of temporary buffers that are live at once in some order of ops that a program allows.

A life that surely ends before another begins never meets it. This orders lives, and those that may all be live at
once are an antichain of that order: the heaviest one is the most that any interleaving of the streams can hold, and
no placement can take less. Whichever of them begins last in the program's text, the others began before it and its
stream may not know that they ended, so the bytes of those bound the antichain from above; the bound is exact where no
two of those exclude each other. Else a minimum cut finds the heaviest of them (Dilworth).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zeroir.memory.lifetimes import Lifetimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_CUTS: Final = 16
"""So many beginnings are looked at closely where the first bound is not exact."""

_MOST_PAIRS: Final = 4_000
_MOST_PIVOTS: Final = 16
_MANY: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MostLive:
    """Lives that may all be live at once, by their numbers, when the last of them begins, and their bytes.

    ``size_bytes`` is the most that there is where ``is_exact``; else more than ``bound_bytes`` there never is.
    """

    moment: int
    lives: Sequence[int]
    size_bytes: int
    bound_bytes: int

    @property
    def is_exact(self) -> bool:
        """Whether no legal order of ops holds more."""
        return self.size_bytes == self.bound_bytes


def most_live(found: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> MostLive:
    """The fullest that some legal order of ops makes it, of these lives; ``sizes`` are the bytes of every life."""
    import numpy as np

    best = MostLive(moment=-1, lives=(), size_bytes=0, bound_bytes=0)
    if not lives:
        return best
    chosen = np.array(lives)
    firsts, streams = np.array(found.firsts)[chosen], np.array(found.streams)[chosen]
    bytes_of = np.array(sizes, dtype=np.int64)[chosen]
    # The bytes that may be live when each life begins, for all that its stream knows.
    bounds = np.zeros(len(lives), dtype=np.int64)
    free_from: dict[int, NDArray[np.int64]] = {}
    for stream in np.unique(streams).tolist():
        free_from[stream] = np.array(found.free_from[stream])[chosen]
        changes = np.zeros(found.stop + 1, dtype=np.int64)
        np.add.at(changes, firsts, bytes_of)
        np.subtract.at(changes, free_from[stream], bytes_of)
        of_stream = streams == stream
        bounds[of_stream] = changes.cumsum()[firsts[of_stream]]
    most_cuts = _MOST_CUTS if len(lives) < _MANY else 2
    for tried, at in enumerate(np.argsort(-bounds, kind="stable")[: most_cuts + 1].tolist()):
        bound = int(bounds[at])
        if bound <= best.size_bytes and best.lives:
            break
        if tried == most_cuts:
            return replace(best, bound_bytes=bound)
        moment = int(firsts[at])
        is_there = (firsts <= moment) & (moment < free_from[int(streams[at])])
        kept = _heaviest(found, chosen[is_there].tolist(), sizes, moment)
        size = sum(sizes[i] for i in kept)
        if size > best.size_bytes or not best.lives:
            best = MostLive(moment=moment, lives=kept, size_bytes=size, bound_bytes=size)
    return best


def _heaviest(
    found: Lifetimes, there: Sequence[int], sizes: Sequence[int], moment: int
) -> Sequence[int]:
    """Of lives that the one that begins last may meet, the heaviest of those that may all meet each other.

    Those that stand in the program until that moment do; but of others the stream merely does not know that they are
    over, and they may exclude each other. Where these are many, the best of a few choices is taken.
    """
    over = [i for i in there if found.lasts[i] < moment]
    if not _excluded(found, over, there):
        return there
    if len(over) * len(there) <= _MOST_PAIRS:
        pairs = [(i, j) for i in over for j in there if i < j and found.is_before(i, j)]
        return _cut(there, pairs, sizes)
    current = [j for j in there if found.lasts[j] >= moment]
    best: list[int] = current
    for pivot in sorted(over, key=lambda i: (-sizes[i], i))[
        : _MOST_PIVOTS if len(there) < _MANY else 2
    ]:
        at = found.firsts[pivot]
        late = [i for i in over if found.firsts[i] <= at < found.lasts[i]]
        excluded = _excluded(found, late, current)
        kept = [j for j in current if j not in excluded]
        best = max(best, kept + late, key=lambda chosen: sum(sizes[i] for i in chosen))
    return best


def _excluded(found: Lifetimes, over: Sequence[int], others: Sequence[int]) -> set[int]:
    """Those of the others that begin only after one of these lives has surely ended."""
    if not over:
        return set()
    streams = {found.streams[j] for j in others}
    free = {stream: min(found.free_from[stream][i] for i in over) for stream in streams}
    return {j for j in others if free[found.streams[j]] <= found.firsts[j]}


def _cut(
    there: Sequence[int], ordered: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> Sequence[int]:
    """The heaviest choice without any of the ordered pairs."""
    import networkx

    graph = networkx.DiGraph()
    for i, j in ordered:
        graph.add_edge("source", (i, "ends"), capacity=sizes[i])
        graph.add_edge((i, "ends"), (j, "begins"))
        graph.add_edge((j, "begins"), "sink", capacity=sizes[j])
    _, (near, _) = networkx.minimum_cut(graph, "source", "sink")
    return [
        i
        for i in there
        if ((i, "ends") not in graph or (i, "ends") in near) and (i, "begins") not in near
    ]
