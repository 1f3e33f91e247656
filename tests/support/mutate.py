"""Small damages to programs: what a wrong pass, a slipped hand or a lost line would do.

A mutation is a function of a program and a source of chance; it returns the damaged program, or None where there is
nothing of its kind to damage. Whether the damage matters is for the verifier, or for a run, to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import cast

from tests.support.edits import Mutation, at, edit, is_of, on_one, pick
from tests.support.mutate_claims import CLAIM_MUTATIONS
from tests.support.mutate_detours import DETOUR_MUTATIONS
from tests.support.mutate_pages import PAGE_MUTATIONS
from tests.support.mutate_saves import SAVE_MUTATIONS
from tests.support.mutate_slices import SLICE_MUTATIONS
from tests.support.mutate_sums import SUM_MUTATIONS
from tests.support.mutate_updates import UPDATE_MUTATIONS
from tests.support.mutate_visits import VISIT_MUTATIONS
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import HOST
from zeroir.ir.ops import Mode, Op, Reduction
from zeroir.ir.program import Program, State
from zeroir.ir.segments.segment import Segment
from zeroir.passes.common.rewrite import map_regions

COLLECTIVES = (ops.AllGather, ops.Prefetch, ops.ReduceScatter, ops.AllReduce, ops.Broadcast)


def _nothing(_op: Op, _program: Program, _chance: Random) -> tuple[Op, ...]:
    return ()


def _any(op: Op) -> bool:
    return op is not None


def _swap(program: Program, chance: Random) -> Program | None:
    section = chance.randrange(len(program.sections))
    count = len(program.sections[section].body)
    if count < 2:
        return None
    i = chance.randrange(count - 1)

    def change(body: list[Op]) -> None:
        body[i], body[i + 1] = body[i + 1], body[i]

    return edit(program, section, change)


def _move(program: Program, chance: Random) -> Program | None:
    section = chance.randrange(len(program.sections))
    count = len(program.sections[section].body)
    if count < 2:
        return None
    start, stop = chance.randrange(count), chance.randrange(count)

    def change(body: list[Op]) -> None:
        body.insert(stop, body.pop(start))

    return edit(program, section, change)


def _stream(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    stream = chance.choice([s.name for s in program.streams if s.executor == "device"])
    if isinstance(op, ops.Wait):
        return (replace(op, on=stream),)
    return (replace(op, stream=stream),)


def _regions(op: Op) -> list[Region]:
    found: list[Region] = []

    def note(region: Region) -> Region:
        found.append(region)
        return region

    map_regions(op, note)
    return found


def _one_region(
    op: Op, chance: Random, change: Callable[[Region], Region]
) -> tuple[Op, ...] | None:
    count = len(_regions(op))
    if not count:
        return None
    chosen = chance.randrange(count)
    seen = -1

    def maybe(region: Region) -> Region:
        nonlocal seen
        seen += 1
        return change(region) if seen == chosen else region

    return (map_regions(op, maybe),)


def _shift(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    def change(region: Region) -> Region:
        room = program.buffer_by_name[region.buffer].numel - region.numel
        steps = [s for s in (-64, -8, -1, 1, 8, 64) if 0 <= region.offset + s <= room]
        return replace(region, offset=region.offset + chance.choice(steps)) if steps else region

    return _one_region(op, chance, change)


def _other_buffer(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Use a buffer of the same type instead."""

    def change(region: Region) -> Region:
        mine = program.buffer_by_name[region.buffer]
        alike = [
            b.name
            for b in program.buffers
            if (b.dtype, b.numel, b.space) == (mine.dtype, mine.numel, mine.space)
        ]
        return replace(region, buffer=chance.choice(alike))

    return _one_region(op, chance, change)


def _reshard(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    axis = program.mesh.axes[0].name
    return _one_region(op, chance, lambda r: replace(r, shard=None if r.shard else axis))


def _mode(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    def other(mode: Mode) -> Mode:
        return Mode.ACCUMULATE if mode is Mode.WRITE else Mode.WRITE

    if isinstance(op, ops.Cast):
        return (replace(op, mode=other(op.mode)),)
    if not isinstance(op, ops.Compute):
        return None
    found = [i for i, d in enumerate(op.destinations) if d is not None]
    if not found:
        return None
    chosen = chance.choice(found)
    destinations = tuple(
        replace(d, mode=other(d.mode)) if i == chosen and d is not None else d
        for i, d in enumerate(op.destinations)
    )
    return (replace(op, destinations=destinations),)


def _drop_result(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, ops.Compute) or not op.destinations:
        return None
    chosen = chance.randrange(len(op.destinations))
    return (
        replace(
            op,
            destinations=tuple(None if i == chosen else d for i, d in enumerate(op.destinations)),
        ),
    )


def _reduction(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, ops.AllReduce | ops.ReduceScatter):
        return None
    other = Reduction.MAX if op.reduction is Reduction.SUM else Reduction.SUM
    return (replace(op, reduction=other),)


def _comm(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, COLLECTIVES):
        return None
    return (replace(op, comm=chance.choice([c.name for c in program.comms])),)


def _drop_pair(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, COLLECTIVES) or len(op.pairs) < 2:
        return None
    chosen = chance.randrange(len(op.pairs))
    return (replace(op, pairs=tuple(p for i, p in enumerate(op.pairs) if i != chosen)),)


def _fill(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
    return (replace(op, value=1.0),) if isinstance(op, ops.Fill) else None


def _scale(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Multiply what the op wrote by a scalar."""
    regions = [
        r
        for r in _regions(op)
        if program.buffer_by_name[r.buffer].dtype.is_floating
        and program.buffer_by_name[r.buffer].space == "device"
    ]
    if not regions or isinstance(op, ops.Wait):
        return None
    by = Region(buffer="loss_scale", offset=0, numel=1)
    return (op, ops.Scale(region=chance.choice(regions), by=by, stream=op.stream))


def _arguments(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Exchange two arguments of one type."""
    if not isinstance(op, ops.Compute):
        return None
    kinds = program.segment_by_name[op.segment].inputs
    pairs = [
        (i, j) for i in range(len(kinds)) for j in range(i + 1, len(kinds)) if kinds[i] == kinds[j]
    ]
    if not pairs:
        return None
    i, j = chance.choice(pairs)
    arguments = list(op.arguments)
    arguments[i], arguments[j] = arguments[j], arguments[i]
    return (replace(op, arguments=tuple(arguments)),)


def _has_gradient(op: Op) -> bool:
    return isinstance(op, ops.Compute) and any(
        d is not None and d.gradient for d in op.destinations
    )


def _gradient_name(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, ops.Compute):
        return None
    found = [i for i, d in enumerate(op.destinations) if d is not None and d.gradient]
    if not found:
        return None
    chosen = chance.choice(found)
    destinations = list(op.destinations)
    old = destinations[chosen]
    assert old is not None
    destinations[chosen] = replace(old, gradient=None)
    return (replace(op, destinations=tuple(destinations)),)


def _wrong_segment(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Call another segment that takes and makes as many values, of the same types where there is one."""
    if not isinstance(op, ops.Compute):
        return None
    mine = program.segment_by_name[op.segment]
    others = [s for s in program.segments if s is not mine]
    alike = [s.name for s in others if _signature(s) == _signature(mine)]
    alike = alike or [s.name for s in others if _arity(s) == _arity(mine)]
    return (replace(op, segment=chance.choice(alike)),) if alike else None


def _signature(segment: Segment) -> tuple[object, ...]:
    return segment.inputs, segment.output_types()


def _arity(segment: Segment) -> tuple[int, int]:
    return len(segment.inputs), len(segment.outputs)


def _wire(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, COLLECTIVES):
        return None
    return (replace(op, wire_dtype=chance.choice([DType.F64, DType.F32, DType.F16, DType.BF16])),)


def _staging(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Stage in memory that is something else's."""
    if not isinstance(op, COLLECTIVES):
        return None
    buffer = chance.choice([b for b in program.buffers if b.space == "device"])
    return (replace(op, staging=Region(buffer=buffer.name, offset=0, numel=buffer.numel)),)


def _pair(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Let one launch do another's work, too."""
    if not isinstance(op, COLLECTIVES):
        return None
    others = [o for o in program.ops() if isinstance(o, COLLECTIVES) and type(o) is type(op)]
    return (replace(op, pairs=(*op.pairs, *chance.choice(others).pairs)),)


def _host(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
    return (replace(op, on=HOST),) if isinstance(op, ops.Wait) else None


def _fill_part(op: Op, program: Program, chance: Random) -> tuple[Op, ...] | None:
    """Clear a part of what the op touches, before or after it."""
    regions = [r for r in _regions(op) if program.buffer_by_name[r.buffer].dtype.is_floating]
    if not regions or isinstance(op, ops.Wait):
        return None
    region = chance.choice(regions)
    start = chance.randrange(region.numel)
    part = Region(
        buffer=region.buffer,
        offset=region.offset + start,
        numel=chance.randrange(1, region.numel - start + 1),
    )
    fill = ops.Fill(destination=part, value=0.0, stream=op.stream)
    return (fill, op) if chance.random() < 0.5 else (op, fill)


def _state(program: Program, chance: Random) -> Program | None:
    """A holding says something else, on both sides of its boundary."""
    holdings = [h for s in program.sections for h in (*s.entry.holdings, *s.exit.holdings)]
    if not holdings:
        return None
    chosen = chance.choice(holdings)
    content = chosen.content
    if not isinstance(content, FlatContent):
        return None
    choices = [
        replace(content, micro=chance.choice(list(Micro)) if content.micro else None),
        replace(content, reduced=()),
        replace(content, version=content.version + 1),
        replace(content, shard=None),
    ]
    changed = replace(chosen, content=chance.choice(choices))

    def told(state: State) -> State:
        return replace(state, holdings=tuple(changed if h == chosen else h for h in state.holdings))

    sections = (replace(s, entry=told(s.entry), exit=told(s.exit)) for s in program.sections)
    return replace(program, sections=tuple(sections))


def _scalar(program: Program, chance: Random) -> Program | None:
    chosen = chance.choice(program.scalars)
    values = tuple(value + 0.5 for value in chosen.values)
    scalars = (replace(s, values=values) if s is chosen else s for s in program.scalars)
    return replace(program, scalars=tuple(scalars))


def _repeat_later(program: Program, chance: Random) -> Program | None:
    place = pick(program, chance, _any)
    if place is None:
        return None
    op = at(program, place)
    if not isinstance(op, ops.Wait):
        op = cast(Op, dataclasses.replace(op, event=None))

    def change(body: list[Op]) -> None:
        body.insert(chance.randrange(place[1] + 1, len(body) + 1), op)

    return edit(program, place[0], change)


def _twice(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...]:
    second = op if isinstance(op, ops.Wait) else cast(Op, dataclasses.replace(op, event=None))
    return (op, second)


MUTATIONS: Mapping[str, Mutation] = {
    "drop-op": on_one(_any, _nothing),
    "drop-wait": on_one(is_of(ops.Wait), _nothing),
    "drop-release": on_one(is_of(ops.Release), _nothing),
    "drop-collective": on_one(is_of(*COLLECTIVES), _nothing),
    "drop-pair": on_one(is_of(*COLLECTIVES), _drop_pair),
    "drop-result": on_one(is_of(ops.Compute), _drop_result),
    "swap-adjacent": _swap,
    "move-op": _move,
    "repeat-op": on_one(_any, _twice),
    "repeat-later": _repeat_later,
    "change-stream": on_one(_any, _stream),
    "change-wait": on_one(is_of(ops.Wait), _stream),
    "shift-region": on_one(_any, _shift),
    "other-buffer": on_one(_any, _other_buffer),
    "change-shard": on_one(_any, _reshard),
    "flip-mode": on_one(is_of(ops.Compute, ops.Cast), _mode),
    "change-reduction": on_one(is_of(*COLLECTIVES), _reduction),
    "change-comm": on_one(is_of(*COLLECTIVES), _comm),
    "change-fill": on_one(is_of(ops.Fill), _fill),
    "scale": on_one(_any, _scale),
    "exchange-arguments": on_one(is_of(ops.Compute), _arguments),
    "unname-gradient": on_one(_has_gradient, _gradient_name),
    "wrong-segment": on_one(is_of(ops.Compute), _wrong_segment),
    "change-wire": on_one(is_of(*COLLECTIVES), _wire),
    "stage-over": on_one(is_of(*COLLECTIVES), _staging),
    "add-pair": on_one(is_of(*COLLECTIVES), _pair),
    "host-wait": on_one(is_of(ops.Wait), _host),
    "fill-part": on_one(_any, _fill_part),
    "change-state": _state,
    "change-scalar": _scalar,
    **CLAIM_MUTATIONS,
    **DETOUR_MUTATIONS,
    **PAGE_MUTATIONS,
    **SAVE_MUTATIONS,
    **SLICE_MUTATIONS,
    **SUM_MUTATIONS,
    **UPDATE_MUTATIONS,
    **VISIT_MUTATIONS,
}
