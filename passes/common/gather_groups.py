"""The gathers of a section, and which of them are read first by the same op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.common import rewrite


@dataclass(slots=True, kw_only=True)
class PlacedGather:
    """A gather into one buffer or several, and the indices of this gather and of the allocs of its buffers.

    ``earliest`` is one past the last op that the gather must follow: a release that ended a previous life of a buffer,
    or a change of what is gathered. ``first_use`` is None where no op reads the gathered buffers.
    """

    op: ops.AllGather
    allocs: tuple[int, ...]
    index: int
    earliest: int
    first_use: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherGroup:
    """The gathers whose buffers the compute op at ``first_use`` is the first to read."""

    first_use: int
    gathers: tuple[PlacedGather, ...]


def find_groups(body: Sequence[Op], program: Program) -> tuple[GatherGroup, ...]:
    """The groups of a section in order of use. Gathers of buffers that no op reads are left out."""
    by_use: dict[int, list[PlacedGather]] = {}
    for gather in _gathers(body, program):
        if gather.first_use is not None:
            by_use.setdefault(gather.first_use, []).append(gather)
    return tuple(GatherGroup(first_use=use, gathers=tuple(by_use[use])) for use in sorted(by_use))


def _gathers(body: Sequence[Op], program: Program) -> list[PlacedGather]:
    """The gathers of a section into temporary buffers, in program order."""
    gathers: list[PlacedGather] = []
    live: dict[str, PlacedGather] = {}
    allocs: dict[str, int] = {}
    releases: dict[str, int] = {}
    changes: dict[str, int] = {}
    for index, op in enumerate(body):
        match op:
            case ops.Alloc():
                allocs[op.buffer] = index
            case ops.Release():
                releases[op.buffer] = index
                live.pop(op.buffer, None)
            case ops.AllGather() if _is_temporary(op, program, allocs):
                names = [pair.destination.buffer for pair in op.pairs]
                sources = (pair.source.buffer for pair in op.pairs)
                after = (
                    *(releases.get(name, -1) for name in names),
                    *(changes.get(name, -1) for name in sources),
                )
                gather = PlacedGather(
                    op=op,
                    allocs=tuple(allocs[name] for name in names),
                    index=index,
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


def _is_temporary(op: ops.AllGather, program: Program, allocs: dict[str, int]) -> bool:
    """Whether a gather fills nothing but gathered buffers that begin in this section."""
    names = [pair.destination.buffer for pair in op.pairs]
    return all(
        name in allocs and program.buffer_by_name[name].role is Role.GATHERED for name in names
    )


def ahead(op: ops.AllGather) -> ops.Prefetch:
    """The gather as a ``prefetch``, the name of a gather that is issued ahead of its first use."""
    return ops.Prefetch(
        pairs=op.pairs,
        comm=op.comm,
        stream=op.stream,
        event=op.event,
        wire_dtype=op.wire_dtype,
        staging=op.staging,
    )
