"""The buffers that a bound limits, and their groups, as ``zeroir.ir.bounds`` defines them.

The passes have their own functions for this, which the verifier does not use: one that forgot a buffer, or merged two
groups, would affect the law and the waits in the same way. This module defines it life by life: a *life* of a buffer is
the ops from an ``alloc`` to the next ``release``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import BoundKind
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.ops import Op
from zeroir.ir.program import Program


def kinds_of_buffers(program: Program) -> Mapping[str, BoundKind]:
    """Return the kind of each buffer to which a bound can apply, by name."""
    gradients = set(_contributed(program.ops()))
    moved: set[str] = set()
    moved_to_disk: set[str] = set()
    for op in program.ops():
        if isinstance(op, ops.Transfer):
            names = {op.source.buffer, op.destination.buffer}
            moved |= names
            if isinstance(op, ops.Load | ops.Store):
                moved_to_disk |= names
    kinds = {
        buffer.name: _kind(buffer, gradients, moved, moved_to_disk)
        for buffer in program.buffers
        if not buffer.is_persistent
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _contributed(body: Iterable[Op]) -> Iterator[str]:
    """Yield the buffers to which compute ops write gradients."""
    for op in body:
        for destination in op.destinations if isinstance(op, ops.Compute) else ():
            if destination is not None and destination.gradient is not None:
                yield destination.view.region.buffer


def _kind(
    buffer: Buffer, gradients: set[str], moved: set[str], moved_to_disk: set[str]
) -> BoundKind | None:
    if buffer.name in gradients:
        return BoundKind.FULL_GRADIENTS
    match buffer.role, buffer.space:
        case Role.GATHERED, _:
            return BoundKind.FULL_PARAMETERS
        case Role.PAGE, _:
            return BoundKind.PAGES
        case ((Role.SAVED | Role.ACTIVATION), Space.DEVICE):
            return BoundKind.ACTIVATIONS
        case Role.STAGING, Space.HOST if buffer.name in moved_to_disk:
            return BoundKind.DISK_STAGING
        case Role.STAGING, Space.HOST if buffer.name in moved:
            return BoundKind.HOST_STAGING
        case Role.STAGING, Space.DEVICE if buffer.name in moved:
            return BoundKind.DEVICE_STAGING
        case _:
            return None


def groups_of_releases(body: Sequence[Op], kinds: Mapping[str, BoundKind]) -> Mapping[int, int]:
    """Return for each release of such a buffer in a section, by its line, the line of the op that identifies its group.

    A release for which no op in the section identifies the group is a group of its own.
    """
    return _Lives(body, kinds).groups()


class _Lives:
    """The ops of a section that use each buffer, and where its lives begin."""

    def __init__(self, body: Sequence[Op], kinds: Mapping[str, BoundKind]) -> None:
        self._body = body
        self._kinds = kinds
        self._begins: dict[str, list[int]] = {}
        self._reads: dict[str, list[int]] = {}
        self._writes: dict[str, list[int]] = {}
        for line, op in enumerate(body):
            effect = effects(op)
            for lines, names in (
                (self._begins, effect.allocs),
                (self._reads, [region.buffer for region in effect.reads]),
                (self._writes, [r.buffer for r in (*effect.writes, *effect.accumulates)]),
            ):
                for name in dict.fromkeys(names):
                    lines.setdefault(name, []).append(line)

    def groups(self) -> Mapping[int, int]:
        made: dict[int, int] = {}
        for line, op in enumerate(self._body):
            if isinstance(op, ops.Release) and op.buffer in self._kinds:
                maker = self._maker(op.buffer, line)
                made[line] = line if maker is None else maker
        return made

    def _maker(self, name: str, stop: int) -> int | None:
        """Return the op that identifies the group of the life of a buffer that is open before line ``stop``."""
        match self._kinds[name]:
            case BoundKind.PAGES:
                return None
            case BoundKind.FULL_PARAMETERS:
                return next(self._during(self._reads, name, stop), None)
            case BoundKind.ACTIVATIONS:
                return next(self._during(self._writes, name, stop), None)
            case BoundKind.FULL_GRADIENTS:
                return self._completer(name, stop)
            case BoundKind.DEVICE_STAGING | BoundKind.HOST_STAGING | BoundKind.DISK_STAGING:
                filling = (
                    line
                    for line in self._during(self._writes, name, stop)
                    if not isinstance(self._body[line], ops.Transfer)
                )
                uses = [*self._during(self._reads, name, stop), *filling]
                return min(uses, default=None)

    def _completer(self, name: str, stop: int) -> int | None:
        """Return the last op that writes a gradient; for gradients that one launch reduces, the last of all of them."""
        writer = max(self._during(self._writes, name, stop), default=None)
        launches = [
            line
            for line in self._during(self._reads, name, stop)
            if isinstance(self._body[line], ops.ReduceScatter) and (writer is None or line > writer)
        ]
        if not launches:
            return writer
        launch = launches[-1]
        together = {
            region.buffer
            for region in effects(self._body[launch]).reads
            if self._kinds.get(region.buffer) is BoundKind.FULL_GRADIENTS
        }
        completers = (self._completer(other, launch) for other in together)
        return max(launch if line is None else line for line in completers)

    def _during(self, lines: Mapping[str, list[int]], name: str, stop: int) -> Iterator[int]:
        """Yield those of these lines that are in the life of a buffer that is open before line ``stop``, in order."""
        begins = self._begins.get(name, [])
        begun = bisect_left(begins, stop)
        start = begins[begun - 1] if begun else -1
        own = lines.get(name, [])
        yield from own[bisect_left(own, start + 1) : bisect_left(own, stop)]
