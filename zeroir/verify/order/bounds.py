"""Bounds: in no order of the streams are more buffers of a kind live than the program's bounds allow (Z302, Z503).

``zeroir.ir.bounds`` defines the meaning of a bound. The verifier determines itself which buffers it limits, and whether
a release is done when a buffer begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.bounds import (
    AheadBound,
    BehindBound,
    Bound,
    BoundKind,
    LiveBound,
)
from zeroir.ir.program import Program, Section
from zeroir.verify.context import Findings
from zeroir.verify.order.bounded_buffers import groups_of_releases, kinds_of_buffers
from zeroir.verify.order.happens_before import HappensBefore


def check_bounds(program: Program, findings: Findings) -> None:
    """Check every section of a program that has bounds."""
    if not program.bounds:
        return
    kinds = kinds_of_buffers(program)
    for section in program.sections:
        _BoundsCheck(program, section, kinds, findings).run()


class _Releases:
    """The releases of one kind's buffers so far, and for each stream those that may not be done yet."""

    def __init__(self) -> None:
        self.group_ranks: dict[int, int] = {}
        self._all: list[tuple[int, int]] = []
        # A release that is done before the next op of a stream is done before all later ones, and is dropped here.
        self._open: dict[int, list[tuple[int, int]]] = {}

    def add(self, group: int, number: int) -> None:
        """Add the release with this number among the issued ops."""
        rank = self.group_ranks.setdefault(group, len(self.group_ranks))
        for releases in (self._all, *self._open.values()):
            releases.append((rank, number))

    def first_open(self, stream: int, ahead: int, order: HappensBefore) -> int | None:
        """Return a release that must be done when the stream's next op starts, and may not be."""
        limit = len(self.group_ranks) - ahead
        releases = self._open.get(stream, self._all)
        kept = [
            (rank, number)
            for rank, number in releases
            if rank >= limit or not order.is_before(number, stream)
        ]
        self._open[stream] = kept
        return next((number for rank, number in kept if rank < limit), None)


class _BoundsCheck:
    """The check of one section. Bounds do not count the ops that are pending at its entry."""

    def __init__(
        self,
        program: Program,
        section: Section,
        kinds: Mapping[str, BoundKind],
        findings: Findings,
    ) -> None:
        self.section = section
        self.kinds = kinds
        self.findings = findings
        self.order = HappensBefore(program, section)
        self.bounds = {bound.kind: bound for bound in program.bounds}
        self.groups = groups_of_releases(section.body, kinds)
        self.releases = {bound.kind: _Releases() for bound in program.bounds}
        self.open: dict[BoundKind, int] = dict.fromkeys(self.releases, 0)
        """How many buffers of each kind have begun and are released later."""
        self.last_op: dict[int, int] = {}
        """The number of each stream's last op, without allocs."""

    def run(self) -> None:
        """Check the section."""
        for line, op in enumerate(self.section.body):
            if isinstance(op, ops.Wait):
                self.order.wait(op)
                continue
            stream = self.order.streams[op.stream]
            bound = None
            if isinstance(op, ops.Alloc) and op.buffer in self.kinds:
                bound = self.bounds.get(self.kinds[op.buffer])
                if bound is not None:
                    self._check(bound, op, stream, line)
                    self.open[bound.kind] += 1
            number = self.order.issue(line, op)
            if not isinstance(op, ops.Alloc):
                self.last_op[stream] = number
            if isinstance(op, ops.Release) and self.kinds.get(op.buffer) in self.releases:
                self.releases[self.kinds[op.buffer]].add(self.groups[line], number)
                self.open[self.kinds[op.buffer]] -= 1

    def _check(self, bound: Bound, op: ops.Alloc, stream: int, line: int) -> None:
        match bound:
            case AheadBound():
                number = self.releases[bound.kind].first_open(stream, bound.ahead, self.order)
                if number is None:
                    return
                release = self.order.issued[number]
                name = release.op.buffer if isinstance(release.op, ops.Release) else ""
                sentence = (
                    f"alloc %{op.buffer} may run before the release of %{name} @{release.line}, though the program's "
                    f"bound `{bound.kind.value} ahead={bound.ahead}` has that release done by then"
                )
            case BehindBound():
                last = self.last_op.get(self.order.streams[bound.behind])
                if last is None or self.order.is_before(last, stream):
                    return
                number, name = last, op.buffer
                sentence = (
                    f"alloc %{op.buffer} may run before the op @{self.order.issued[last].line} of the stream "
                    f"{bound.behind}, though the program's bound `{bound.kind.value} behind={bound.behind}` has that "
                    "op done by then"
                )
            case LiveBound():
                self._check_live(bound, op, stream, line)
                return
            case _:
                assert_never(bound)
        at = self.order.issued[number].line
        self.findings.add(
            "Z302",
            sentence,
            section=self.section,
            line=line,
            buffers=tuple(dict.fromkeys((op.buffer, name))),
            advice=f"Let op {at} signal an event, and wait for it on {op.stream} before this op.",
        )

    def _check_live(self, bound: LiveBound, op: ops.Alloc, stream: int, line: int) -> None:
        room = bound.live - 1 - self.open[bound.kind]
        number = self.releases[bound.kind].first_open(stream, max(room, 0), self.order)
        if number is None and room >= 0:
            return
        names = [op.buffer]
        if number is None:
            why = f"{bound.live} others are live there"
            advice = "Release one of them before this op."
        else:
            release = self.order.issued[number]
            names += [release.op.buffer] if isinstance(release.op, ops.Release) else []
            why = f"it may run before the release of %{names[-1]} @{release.line}"
            advice = f"Let op {release.line} signal an event, and wait for it on {op.stream} before this op."
        self.findings.add(
            "Z503" if bound.kind is BoundKind.PAGES else "Z302",
            f"alloc %{op.buffer} may be one too many for the program's bound `{bound.kind.value} live={bound.live}`: "
            f"{why}",
            section=self.section,
            line=line,
            buffers=tuple(dict.fromkeys(names)),
            advice=advice,
        )
