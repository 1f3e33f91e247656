"""The gathers of a section, grouped by their first reader.

A gather from a visit (``zeroir.passes.common.visits``) moves together with it: the visit begins and is filled right
before the gather, and ends right after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.common import rewrite


@dataclass(slots=True, kw_only=True)
class PlacedGather:
    """A gather into one buffer or several at ``index``, and the indices of the ops that move with it.

    ``begins`` precede it: the allocs of its buffers, and those and the transfers of the visits that it reads. ``ends``
    follow it: the releases of these visits. ``earliest`` is one past the last op that all of them must follow: a
    release that ended a previous life of a buffer, or a change of the gathered values. ``first_use`` is None if no
    op reads the gathered buffers.
    """

    op: ops.AllGather
    begins: tuple[int, ...]
    index: int
    ends: tuple[int, ...]
    earliest: int
    first_use: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """All ops that move, in order."""
        return (*self.begins, self.index, *self.ends)

    def issued(self, body: Sequence[Op], gather: Op) -> Iterator[Op]:
        """Yield the ops that move, in order, with ``gather`` instead of the original gather."""
        for index in self.indices:
            yield gather if index == self.index else body[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherGroup:
    """The gathers whose buffers are first read by the compute op at ``first_use``."""

    first_use: int
    gathers: tuple[PlacedGather, ...]


def find_groups(body: Sequence[Op], program: Program) -> tuple[GatherGroup, ...]:
    """Return the groups of a section in order of use. Gathers of buffers that no op reads are omitted."""
    by_use: dict[int, list[PlacedGather]] = {}
    for gather in _gathers(body, program):
        if gather.first_use is not None:
            by_use.setdefault(gather.first_use, []).append(gather)
    return tuple(GatherGroup(first_use=use, gathers=tuple(by_use[use])) for use in sorted(by_use))


def _gathers(body: Sequence[Op], program: Program) -> list[PlacedGather]:
    """Return the gathers of a section into temporary buffers, in program order."""
    gathers: list[PlacedGather] = []
    live: dict[str, PlacedGather] = {}
    allocs: dict[str, int] = {}
    releases: dict[str, int] = {}
    changes: dict[str, int] = {}
    visits = _visits(body, program)
    for index, op in enumerate(body):
        match op:
            case ops.Alloc():
                allocs[op.buffer] = index
            case ops.Release():
                releases[op.buffer] = index
                live.pop(op.buffer, None)
            case ops.AllGather() if _is_temporary(op, program, allocs):
                read = [visits.get((pair.source.buffer, index)) for pair in op.pairs]
                if any(visit is not None and not visit.is_own for visit in read):
                    continue
                own = [visit for visit in read if visit is not None]
                names = [pair.destination.buffer for pair in op.pairs]
                sources = [
                    pair.source.buffer for pair in op.pairs if pair.source.buffer not in allocs
                ]
                sources += [home for visit in own for home in visit.homes]
                begun = [*names, *(visit.name for visit in own)]
                after = (
                    *(releases.get(name, -1) for name in begun),
                    *(changes.get(name, -1) for name in sources),
                )
                begins = [i for visit in own for i in visit.begins]
                gather = PlacedGather(
                    op=op,
                    begins=(*begins, *(allocs[name] for name in names)),
                    index=index,
                    ends=tuple(visit.release for visit in own),
                    earliest=max(after) + 1,
                )
                live.update(dict.fromkeys(names, gather))
                gathers.append(gather)
            case _:
                effect = effects(op)
                changed = (*effect.writes, *effect.accumulates)
                changes.update((region.buffer, index) for region in changed)
                for name in rewrite.used_buffers(op) & live.keys():
                    if live[name].first_use is None:
                        live[name].first_use = index
    return gathers


@dataclass(slots=True, kw_only=True)
class _GatheredVisit:
    """A temporary buffer from which a gather reads: the ops that begin and fill it, its release, its other uses.

    ``homes`` are the buffers from which transfers fill it.
    """

    name: str
    begins: list[int]
    homes: list[str]
    others: int = 0
    is_from_rest: bool = True
    release: int = -1

    @property
    def is_own(self) -> bool:
        """Whether transfers from buffers at rest fill the visit, and only the gather uses it."""
        return self.others == 1 and self.is_from_rest and self.release >= 0


def _visits(body: Sequence[Op], program: Program) -> Mapping[tuple[str, int], _GatheredVisit]:
    """Return the temporary buffers that gathers read, by name and by the index of the gather."""
    visits: dict[tuple[str, int], _GatheredVisit] = {}
    live: dict[str, _GatheredVisit] = {}
    for index, op in enumerate(body):
        match op:
            case ops.Wait():
                pass
            case ops.Alloc():
                live[op.buffer] = _GatheredVisit(name=op.buffer, begins=[index], homes=[])
            case ops.Release():
                if (ended := live.pop(op.buffer, None)) is not None:
                    ended.release = index
            case ops.Transfer() if op.destination.buffer in live:
                visit = live[op.destination.buffer]
                visit.begins.append(index)
                visit.homes.append(op.source.buffer)
                visit.is_from_rest &= program.buffer_by_name[op.source.buffer].is_persistent
            case _:
                for name in rewrite.used_buffers(op) & live.keys():
                    live[name].others += 1
                    if isinstance(op, ops.AllGather):
                        visits[name, index] = live[name]
    return visits


def _is_temporary(op: ops.AllGather, program: Program, allocs: dict[str, int]) -> bool:
    """Return whether a gather only fills gathered buffers that begin in this section."""
    names = [pair.destination.buffer for pair in op.pairs]
    return all(
        name in allocs and program.buffer_by_name[name].role is Role.GATHERED for name in names
    )


def ahead(op: ops.AllGather) -> ops.Prefetch:
    """Return the gather as a ``prefetch``, the name of a gather that is issued before its first use."""
    return ops.Prefetch(
        pairs=op.pairs,
        comm=op.comm,
        stream=op.stream,
        event=op.event,
        wire_dtype=op.wire_dtype,
        staging=op.staging,
    )
