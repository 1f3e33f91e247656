"""Bounds: which buffers of a kind have surely ended when another one begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tools.certificates.spans import require
from tools.checker.bounds import groups, kinds
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord

Releases = list[tuple[int, int]]
"""The group of each release, counted in the order of their first ones, and the number of its op."""


class SectionBounds:
    """What a section has begun and released of the kinds that bounds limit."""

    def __init__(self, names: Declarations, section: FileRecord) -> None:
        kind_of = kinds(names)
        self.bounds = {bound.kind_: bound for bound in names.program.bounds}
        self.kind_of = {name: kind for name, kind in kind_of.items() if kind in self.bounds}
        numbered = [(line, line, op) for line, op in enumerate(section.body)]
        self.group_of = {line: group for line, _, group, _ in groups(numbered, self.kind_of)}
        self.places: dict[str, dict[int, int]] = {kind: {} for kind in self.bounds}
        self.ended: dict[str, Releases] = {kind: [] for kind in self.bounds}
        self.open: dict[tuple[str, str], Releases] = {}
        self.live: Counter[str] = Counter()
        self.last: dict[str, int] = {}

    def begin(self, op: FileRecord, is_done: Callable[[int], bool]) -> None:
        """Check the alloc of a buffer; ``is_done`` says whether an op is done when the alloc starts."""
        kind = self.kind_of.get(op.buffer)
        if kind is None:
            return
        bound, what = self.bounds[kind], f"begins %{op.buffer}, against the bound on {kind}"
        if bound.kind == "BehindBound":
            require(bound.behind not in self.last or is_done(self.last[bound.behind]), what)
        elif bound.kind == "AheadBound":
            self._require_ended(kind, op.stream, bound.ahead, is_done, what)
        else:
            room = bound.live - 1 - self.live[kind]
            require(room >= 0, what)
            self._require_ended(kind, op.stream, room, is_done, what)
        self.live[kind] += 1

    def _require_ended(
        self, kind: str, stream: str, ahead: int, is_done: Callable[[int], bool], what: str
    ) -> None:
        """Require that all groups but the last have ended; what has, has for all later ops of the stream."""
        limit = len(self.places[kind]) - ahead
        releases = self.open.get((kind, stream), self.ended[kind])
        kept = [(place, n) for place, n in releases if place >= limit or not is_done(n)]
        require(all(place >= limit for place, _ in kept), what)
        self.open[kind, stream] = kept

    def issued(self, op: FileRecord, line: int, number: int) -> None:
        """Note an op that is none of the waits."""
        if op.kind != "Alloc":
            self.last[op.stream] = number
        kind = self.kind_of.get(op.buffer) if op.kind == "Release" else None
        if kind is not None:
            place = self.places[kind].setdefault(self.group_of[line], len(self.places[kind]))
            self.live[kind] -= 1
            for releases in (
                self.ended[kind],
                *(of for (other, _), of in self.open.items() if other == kind),
            ):
                releases.append((place, number))
