"""Damages to the transfers of visits, and to the order of these and of what uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, at, edit, is_of, on_one, pick, places, put
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.ops import Op
from zeroir.ir.program import Program

_is_transfer = is_of(ops.Transfer)


def _nothing(_op: Op, _program: Program, _chance: Random) -> tuple[Op, ...]:
    return ()


def _uses(op: Op) -> set[str]:
    effect = effects(op)
    return {region.buffer for region in (*effect.reads, *effect.writes, *effect.accumulates)}


def _early_release(program: Program, chance: Random) -> Program | None:
    """A visit ends before its last use, with all that its end waits for."""
    staging = {name for op in program.ops() if _is_transfer(op) for name in _uses(op)}
    place = pick(program, chance, lambda op: isinstance(op, ops.Release) and op.buffer in staging)
    if place is None:
        return None
    release = at(program, place)
    assert isinstance(release, ops.Release)

    def change(body: list[Op]) -> None:
        del body[place[1]]
        used = [i for i, op in enumerate(body[: place[1]]) if release.buffer in _uses(op)]
        body.insert(used[-1] if used else place[1], release)

    return edit(program, place[0], change)


def _other_slice(program: Program, chance: Random) -> Program | None:
    """A visit is of elements beside those that it should be of."""

    def moved(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
        assert isinstance(op, ops.ToDevice | ops.ToHost | ops.Load | ops.Store)
        home = op.source if isinstance(op, ops.ToDevice | ops.Load) else op.destination
        room = program.buffer_by_name[home.buffer].numel - home.numel
        steps = [s for s in (-64, 64, room) if s and 0 <= home.offset + s <= room]
        if not steps:
            return None
        other = replace(home, offset=home.offset + chance.choice(steps))
        if home is op.source:
            return (replace(op, source=other),)
        return (replace(op, destination=other),)

    return on_one(_is_transfer, moved)(program, chance)


def _half(program: Program, chance: Random) -> Program | None:
    """Only the first half of a visit's elements travels."""

    def halved(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
        assert isinstance(op, ops.ToDevice | ops.ToHost | ops.Load | ops.Store)
        if op.source.numel % 4 or op.destination.numel % 4:
            return None
        return (
            replace(
                op,
                source=replace(op.source, numel=op.source.numel // 2),
                destination=replace(op.destination, numel=op.destination.numel // 2),
            ),
        )

    return on_one(_is_transfer, halved)(program, chance)


def _early_arrival(program: Program, chance: Random) -> Program | None:
    """A visit arrives before what it should bring has come home, or before its buffer is free."""
    found = places(program, is_of(ops.ToDevice, ops.Load))
    place = chance.choice(found) if found else None
    if place is None or place[1] < 2:
        return None

    def change(body: list[Op]) -> None:
        arrival = body.pop(place[1])
        body.insert(chance.randrange(place[1]), arrival)

    return edit(program, place[0], change)


def _unawaited(is_before: Callable[[Op], bool]) -> Mutation:
    """An op does not wait for a transfer, or a transfer for an op."""

    def mutation(program: Program, chance: Random) -> Program | None:
        events = {
            op.event
            for op in program.ops()
            if not isinstance(op, ops.Wait) and op.event is not None and is_before(op)
        }
        place = pick(program, chance, lambda op: isinstance(op, ops.Wait) and op.waited in events)
        return None if place is None else put(program, place)

    return mutation


VISIT_MUTATIONS: Mapping[str, Mutation] = {
    "drop-arrival": on_one(is_of(ops.ToDevice, ops.Load), _nothing),
    "drop-departure": on_one(is_of(ops.ToHost, ops.Store), _nothing),
    "early-arrival": _early_arrival,
    "early-release": _early_release,
    "half-transfer": _half,
    "no-wait-for-transfer": _unawaited(_is_transfer),
    "other-slice": _other_slice,
}
