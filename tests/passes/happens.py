"""An independent judge of order: which ops surely finish before which, by the text of the rules alone.

It knows streams, events and waits, and shares no code with the passes or the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.ops import Op
from zeroir.ir.program import Program


def before(body: Sequence[Op]) -> list[int]:
    """For each op a bit mask of the ops that have surely finished when it begins. No host waits.

    A wait for an event that is pending from before orders nothing here.
    """
    last: dict[str, int] = {}
    signal: dict[str, int] = {}
    masks: list[int] = []
    for index, op in enumerate(body):
        mask = 0
        stream = effects(op).stream
        if stream in last:
            mask |= masks[last[stream]] | 1 << last[stream]
        if isinstance(op, ops.Wait):
            if op.waited in signal:
                signaller = signal[op.waited]
                mask |= masks[signaller] | 1 << signaller
        elif op.event is not None:
            signal[op.event] = index
        masks.append(mask)
        last[stream] = index
    return masks


def touched(op: Op, program: Program) -> Iterator[tuple[Region, bool]]:
    """What an op touches, and whether it changes it."""
    found = effects(op)
    yield from ((region, False) for region in found.reads)
    yield from ((region, True) for region in (*found.writes, *found.accumulates))
    for name in (*found.allocs, *found.frees):
        yield Region(buffer=name, offset=0, numel=program.buffer_by_name[name].numel), True


def conflict(first: Op, second: Op, program: Program) -> bool:
    """Whether on some rank both touch one element and one of them changes it."""
    for a, is_a_write in touched(first, program):
        for b, is_b_write in touched(second, program):
            if a.buffer != b.buffer or not (is_a_write or is_b_write):
                continue
            for coordinate in program.mesh.coordinates():
                a_start, a_stop = a.local_range(program.mesh, coordinate)
                b_start, b_stop = b.local_range(program.mesh, coordinate)
                if a_start < b_stop and b_start < a_stop:
                    return True
    return False


def unordered(body: Sequence[Op], program: Program) -> list[tuple[int, int]]:
    """Pairs of ops that must be ordered and are not: conflicts, and collectives on one communicator."""
    masks = before(body)
    found: list[tuple[int, int]] = []
    for j, second in enumerate(body):
        for i in range(j):
            if masks[j] >> i & 1:
                continue
            comms = {effects(body[i]).comm, effects(second).comm}
            is_shared = len(comms) == 1 and None not in comms
            if is_shared or conflict(body[i], second, program):
                found.append((i, j))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a gathered buffer: the indices of its ops; readers in order."""

    buffer: str
    alloc: int
    gather: int
    readers: tuple[int, ...]
    release: int


def lives(body: Sequence[Op], program: Program) -> list[Life]:
    """The lives of gathered buffers, in the order of their allocation."""
    found: list[Life] = []
    for alloc, op in enumerate(body):
        if not isinstance(op, ops.Alloc):
            continue
        name = op.buffer
        if program.buffer_by_name[name].role is not Role.GATHERED:
            continue
        rest = range(alloc + 1, len(body))
        release = next(
            i for i in rest if isinstance(end := body[i], ops.Release) and end.buffer == name
        )
        gather = next(i for i in rest if name in {r.buffer for r in effects(body[i]).writes})
        readers = tuple(
            i for i in range(alloc, release) if name in {r.buffer for r in effects(body[i]).reads}
        )
        found.append(
            Life(buffer=name, alloc=alloc, gather=gather, readers=readers, release=release)
        )
    return found


def groups_live(body: Sequence[Op], program: Program) -> list[int]:
    """At each gather, the most groups (of buffers with one first reader) that some interleaving has live."""
    masks = before(body)
    found = lives(body, program)
    counts = [0]
    for k, life in enumerate(found):
        live = {life.readers[:1]}
        live |= {e.readers[:1] for e in found[:k] if not masks[life.alloc] >> e.release & 1}
        counts.append(len(live - {()}))
    return counts


def full_gradients_live(body: Sequence[Op], program: Program) -> list[int]:
    """At each allocation of a gradient that a reduce_scatter reads, the most units that some interleaving has live.

    Gradients that the same op completes count once, and so do those that one launch reduces. A gradient whose release
    stands later in the program than the allocation is there by choice and does not count.
    """
    masks = before(body)
    sources = {
        pair.source.buffer
        for op in body
        if isinstance(op, ops.ReduceScatter)
        for pair in op.pairs
        if not program.buffer_by_name[pair.source.buffer].is_persistent
    }
    completed: dict[str, int] = {}
    for index, op in enumerate(body):
        for region in (*effects(op).writes, *effects(op).accumulates):
            completed[region.buffer] = index
    for op in body:
        if isinstance(op, ops.ReduceScatter):
            names = [pair.source.buffer for pair in op.pairs]
            completed.update(dict.fromkeys(names, max(completed[name] for name in names)))
    counts = [0]
    released: list[tuple[int, str]] = []
    for index, op in enumerate(body):
        if isinstance(op, ops.Alloc) and op.buffer in sources:
            live = {completed[name] for at, name in released if not masks[index] >> at & 1}
            counts.append(len(live | {completed[op.buffer]}))
        elif isinstance(op, ops.Release) and op.buffer in sources:
            released.append((index, op.buffer))
    return counts


def most_live(body: Sequence[Op], program: Program) -> int:
    """How much the bounds on gathered units and on full gradients allow, summed over the section."""
    return sum(groups_live(body, program)) + sum(full_gradients_live(body, program))


def staging_live(body: Sequence[Op], program: Program) -> list[int]:
    """At each allocation of a staging buffer of the device that transfers use, the most visits that may be live.

    Buffers with one first user, apart from transfers, are one visit. Counted are those that program order has live, and
    those that some interleaving has not released yet.
    """
    copied = {
        region.buffer
        for op in body
        if isinstance(op, ops.ToDevice | ops.ToHost)
        for region in (op.source, op.destination)
    }
    staging = {
        b.name for b in program.buffers if b.role is Role.STAGING and b.space == "device"
    } & copied
    masks = before(body)
    live: dict[str, int] = {}
    released: list[tuple[int, int]] = []
    counts = [0]
    for index, op in enumerate(body):
        if isinstance(op, ops.Alloc) and op.buffer in staging:
            live[op.buffer] = _first_user(body, index, op.buffer)
            late = {user for at, user in released if not masks[index] >> at & 1}
            counts.append(len({*live.values(), *late}))
        elif isinstance(op, ops.Release) and op.buffer in staging:
            released.append((index, live.pop(op.buffer)))
    return counts


def _first_user(body: Sequence[Op], alloc: int, name: str) -> int:
    for index in range(alloc + 1, len(body)):
        found = effects(body[index])
        used = (*found.reads, *found.writes, *found.accumulates)
        if not isinstance(body[index], ops.ToDevice) and name in {r.buffer for r in used}:
            return index
    raise AssertionError(f"nothing uses %{name}")
