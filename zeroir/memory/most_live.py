"""The most bytes of temporary buffers that are live at once in some order of ops that a program allows.

A life that certainly ends before another begins never overlaps it. This orders lives, and those that may all be live at
once are an antichain of that order: the heaviest antichain is the maximum that any interleaving of the streams needs,
and no placement can need less. Whichever of its lives begins last in program order, the others began before, and the
stream of the last may not know that they ended. The bytes of all such lives bound the antichain from above, and exactly
where no two of them exclude each other. Where some do, a minimum cut finds the heaviest choice (Dilworth).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zeroir.memory.lifetimes import Lifetimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_CUTS: Final = 64
"""The most beginnings for which a cut is computed where the first bound is not exact."""

_MOST_PAIRS: Final = 10_000
"""No cut is computed where more pairs of lives may exclude each other; real programs have hundreds at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MostLive:
    """Lives that may all be live at once, by their numbers, when the last of them begins, and their bytes.

    No legal order of ops needs more than ``bound_bytes``.
    """

    moment: int
    lives: Sequence[int]
    size_bytes: int
    bound_bytes: int

    @property
    def is_exact(self) -> bool:
        """Whether no legal order of ops needs more than these lives."""
        return self.size_bytes == self.bound_bytes


def most_live(lifetimes: Lifetimes, lives: Sequence[int], sizes: Sequence[int]) -> MostLive:
    """Return the maximum that some legal order of ops needs of these lives; ``sizes`` are the bytes of every life."""
    import numpy as np

    best = MostLive(moment=-1, lives=(), size_bytes=0, bound_bytes=0)
    if not lives:
        return best
    chosen = np.array(lives)
    firsts, streams = np.array(lifetimes.firsts)[chosen], np.array(lifetimes.streams)[chosen]
    bytes_of = np.array(sizes, dtype=np.int64)[chosen]
    # The bytes that may be live when each life begins, as far as its stream knows.
    bounds = np.zeros(len(lives), dtype=np.int64)
    free_from: dict[int, NDArray[np.int64]] = {}
    for stream in np.unique(streams).tolist():
        free_from[stream] = np.array(lifetimes.free_from[stream])[chosen]
        changes = np.zeros(lifetimes.stop + 1, dtype=np.int64)
        np.add.at(changes, firsts, bytes_of)
        np.subtract.at(changes, free_from[stream], bytes_of)
        is_begun = streams == stream
        bounds[is_begun] = changes.cumsum()[firsts[is_begun]]
    bound_bytes = 0
    for tried, at in enumerate(np.argsort(-bounds, kind="stable").tolist()):
        bound = int(bounds[at])
        if bound <= best.size_bytes and best.lives:
            break
        if tried == _MOST_CUTS:
            bound_bytes = max(bound_bytes, bound)
            break
        moment = int(firsts[at])
        is_live = (firsts <= moment) & (moment < free_from[int(streams[at])])
        live = chosen[is_live].tolist()
        excluding = _excluding(lifetimes, live, moment)
        if excluding and best.lives and bound - _left_out(excluding, sizes) <= best.size_bytes:
            continue
        if excluding is None:
            bound_bytes = max(bound_bytes, bound)
            heaviest: Sequence[int] = [life for life in live if lifetimes.lasts[life] >= moment]
        else:
            heaviest = _cut(live, excluding, sizes) if excluding else live
        size_bytes = sum(sizes[life] for life in heaviest)
        if size_bytes > best.size_bytes or not best.lives:
            best = MostLive(moment=moment, lives=heaviest, size_bytes=size_bytes, bound_bytes=0)
    return replace(best, bound_bytes=max(best.size_bytes, bound_bytes))


def _excluding(
    lifetimes: Lifetimes, live: Sequence[int], moment: int
) -> Sequence[tuple[int, int]] | None:
    """Return the pairs of which the first has certainly ended when the second begins.

    All these lives may overlap the one that begins last, at that moment. Those that reach it in program order also
    overlap each other; but others ended before, unknown to its stream, and exclude those that began after their end.
    Return None if these may be too many pairs.
    """
    ended = [life for life in live if lifetimes.lasts[life] < moment]
    if not ended:
        return ()
    streams = {lifetimes.streams[life] for life in live}
    first_free = {stream: min(lifetimes.free_from[stream][i] for i in ended) for stream in streams}
    late = [life for life in live if first_free[lifetimes.streams[life]] <= lifetimes.firsts[life]]
    if len(ended) * len(late) > _MOST_PAIRS:
        return None
    return [(i, j) for i in ended for j in late if lifetimes.is_before(i, j)]


def _left_out(excluding: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int:
    """Return bytes that every choice leaves out: a flow through the graph of ``_cut``, found faster than the largest.

    It divides the bytes of all lives into chains of lives of which each excludes the others.
    """
    ends = {earlier: sizes[earlier] for earlier, _ in excluding}
    begins = {later: sizes[later] for _, later in excluding}
    flow = 0
    for earlier, later in excluding:
        more = min(ends[earlier], begins[later])
        ends[earlier] -= more
        begins[later] -= more
        flow += more
    return flow


def _cut(
    live: Sequence[int], excluding: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> Sequence[int]:
    """Return the heaviest choice with at most one life of each of these pairs."""
    import networkx

    graph = networkx.DiGraph()
    for earlier, later in excluding:
        graph.add_edge("source", (earlier, "ends"), capacity=sizes[earlier])
        graph.add_edge((earlier, "ends"), (later, "begins"))
        graph.add_edge((later, "begins"), "sink", capacity=sizes[later])
    _, (near, _) = networkx.minimum_cut(graph, "source", "sink")
    return [
        life
        for life in live
        if ((life, "ends") not in graph or (life, "ends") in near) and (life, "begins") not in near
    ]
