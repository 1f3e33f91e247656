"""Damages to section ``save``, to its snapshots, and to the waits for its copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, edit, pick
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Role, copied_region, whole
from zeroir.ir.contents import FlatContent, SnapshotContent
from zeroir.ir.ops import Op
from zeroir.ir.program import SAVE, Program, State


def _events(program: Program) -> set[str]:
    return {
        b.holds.event
        for b in program.buffers
        if isinstance(b.holds, SnapshotContent) and b.holds.event is not None
    }


def _is_wait(program: Program) -> Callable[[Op], bool]:
    events = _events(program)
    return lambda op: isinstance(op, ops.Wait) and op.waited in events


def _no_wait(program: Program, chance: Random) -> Program | None:
    """An op that overwrites what a copy reads does not wait for it."""
    place = pick(program, chance, _is_wait(program))
    if place is None:
        return None

    def change(body: list[Op]) -> None:
        del body[place[1]]

    return edit(program, place[0], change)


def _late_wait(program: Program, chance: Random) -> Program | None:
    """A wait stands behind the next op of its stream that writes anything."""
    place = pick(program, chance, _is_wait(program))
    if place is None:
        return None

    def change(body: list[Op]) -> None:
        wait = body.pop(place[1])
        assert isinstance(wait, ops.Wait)
        for at in range(place[1], len(body)):
            effect = effects(body[at])
            if effect.stream == wait.on and (effect.writes or effect.accumulates):
                body.insert(at + 1, wait)
                return
        body.append(wait)

    return edit(program, place[0], change)


def _forgotten_event(program: Program, chance: Random) -> Program | None:
    """One state, or every one, does not say that a copy may be under way."""
    events = sorted(_events(program))
    if not events:
        return None
    event = chance.choice(events)

    def without(state: State) -> State:
        return replace(state, pending=tuple(p for p in state.pending if p.event != event))

    at, is_exit = chance.randrange(2 * len(program.sections)), chance.random() < 0.5
    sections = [
        replace(
            s,
            entry=without(s.entry) if at in (n, len(program.sections)) and not is_exit else s.entry,
            exit=without(s.exit) if at in (n, len(program.sections)) and is_exit else s.exit,
        )
        for n, s in enumerate(program.sections)
    ]
    if at > len(program.sections):
        sections = [replace(s, entry=without(s.entry), exit=without(s.exit)) for s in sections]
    return replace(program, sections=tuple(sections))


def _other_source(program: Program, chance: Random) -> Program | None:
    """A copy reads another buffer, and its snapshot may say so."""
    save = program.section_by_name.get(SAVE)
    if save is None:
        return None
    at = chance.randrange(len(save.body))
    copy = save.body[at]
    if not isinstance(copy, ops.ToHost | ops.Cast | ops.Load):
        return None
    source = program.buffer_by_name[copy.source.buffer]
    others = [
        b
        for b in program.buffers
        if (b.space, b.dtype, b.numel) == (source.space, source.dtype, source.numel)
        and b.is_persistent
        and b is not source
    ]
    if not others:
        return None
    other = chance.choice(others).name
    body = list(save.body)
    body[at] = replace(copy, source=replace(copy.source, buffer=other))
    snapshot = copy.destination.buffer
    is_told = chance.random() < 0.5

    def told(buffer: Buffer) -> Buffer:
        if buffer.name != snapshot or not isinstance(buffer.holds, SnapshotContent):
            return buffer
        return replace(buffer, holds=replace(buffer.holds, buffer=other))

    return replace(
        program,
        buffers=tuple(map(told, program.buffers)) if is_told else program.buffers,
        sections=tuple(replace(s, body=tuple(body)) if s is save else s for s in program.sections),
    )


def _other_slice(program: Program, chance: Random) -> Program | None:
    """A snapshot, and its copy, are of a slice along an axis whose ranks hold different elements."""
    save = program.section_by_name.get(SAVE)
    snapshots = [b for b in program.buffers if isinstance(b.holds, SnapshotContent)]
    if save is None or not snapshots:
        return None
    chosen = chance.choice(snapshots)
    assert isinstance(chosen.holds, SnapshotContent)
    source = program.buffer_by_name[chosen.holds.buffer].holds
    shards = [axis.name for axis in program.mesh.axes if axis.size > 1]
    if isinstance(source, FlatContent):
        shards = [name for name in shards if name == source.shard]
    if not shards:
        return None
    content = replace(chosen.holds, shard=chance.choice(shards))
    region = copied_region(content)
    if region.numel % program.mesh.size(content.shard or ""):
        return None
    resized = replace(chosen, holds=content, numel=region.local_numel(program.mesh))
    body = tuple(
        replace(op, source=region, destination=whole(resized))
        if isinstance(op, ops.ToHost | ops.Cast | ops.Load) and op.destination.buffer == chosen.name
        else op
        for op in save.body
    )
    return replace(
        program,
        buffers=tuple(resized if b is chosen else b for b in program.buffers),
        sections=tuple(replace(s, body=body) if s is save else s for s in program.sections),
    )


def _used_snapshot(program: Program, chance: Random) -> Program | None:
    """A step writes a snapshot, from which the host may be writing a file, or goes on from one."""
    snapshots = [b for b in program.buffers if b.role is Role.SNAPSHOT]
    if not snapshots:
        return None
    snapshot = whole(chance.choice(snapshots))
    op: Op = ops.Fill(destination=snapshot, value=0.0, stream="optimizer")
    content = program.buffer_by_name[snapshot.buffer].holds
    if chance.random() < 0.5 and isinstance(content, SnapshotContent):
        op = ops.ToDevice(source=snapshot, destination=copied_region(content), stream="copy_in")
    section = chance.randrange(len(program.sections))
    return edit(program, section, lambda body: body.insert(chance.randrange(len(body) + 1), op))


def _no_snapshot(program: Program, chance: Random) -> Program | None:
    """A buffer of the state has no snapshot."""
    save = program.section_by_name.get(SAVE)
    if save is None or not save.body:
        return None
    dropped = chance.choice([op for op in save.body if not isinstance(op, ops.Wait)])
    (name,) = (region.buffer for region in effects(dropped).writes)

    def without(state: State) -> State:
        return replace(state, pending=tuple(p for p in state.pending if p.event != dropped.event))

    return replace(
        program,
        buffers=tuple(b for b in program.buffers if b.name != name),
        sections=tuple(
            replace(
                s,
                entry=without(s.entry),
                body=tuple(
                    op
                    for op in s.body
                    if op != dropped
                    and not (isinstance(op, ops.Wait) and op.waited == dropped.event)
                ),
                exit=without(s.exit),
            )
            for s in program.sections
        ),
    )


SAVE_MUTATIONS: Mapping[str, Mutation] = {
    "drop-wait-for-copy": _no_wait,
    "late-wait-for-copy": _late_wait,
    "forget-saved-event": _forgotten_event,
    "save-other-buffer": _other_source,
    "save-other-slice": _other_slice,
    "use-snapshot": _used_snapshot,
    "save-less": _no_snapshot,
}
