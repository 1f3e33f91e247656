"""Damages by detours and confusions: what an op uses goes through other memory, or through that of its like.

Some of them change nothing. Others round, or let the host read or write where the program does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random

from tests.support.edits import Mutation, at, pick, put, retyped, with_buffers
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.ir.reports import Quantity
from zeroir.passes.common.rewrite import map_regions

_FLOATING = (DType.F64, DType.F32, DType.BF16, DType.F16)


def _temporary(program: Program, like: Buffer, name: str, dtype: DType) -> Buffer:
    """A temporary buffer like another one, behind all others where temporary buffers have places."""
    ends = [
        buffer.offset + buffer.size_bytes
        for buffer in program.buffers
        if buffer.offset is not None and buffer.space is like.space
    ]
    role = like.role if like.role in (Role.GRAD, Role.ACTIVATION) else Role.STAGING
    has_places = any(buffer.offset is not None for buffer in program.buffers)
    offset = -(-max(ends, default=0) // 64) * 64 if has_places else None
    return replace(like, name=name, dtype=dtype, role=role, holds=None, offset=offset)


def _used(program: Program, op: Op, *, is_written: bool) -> list[Region]:
    """What an op reads or only writes, in memory."""
    effect = effects(op)
    regions = effect.writes if is_written else (*effect.reads, *effect.accumulates)
    touched = (*effect.reads, *effect.accumulates)
    return [
        region
        for region in regions
        if program.buffer_by_name[region.buffer].space is not Space.DISK
        and not (is_written and any(region.overlaps(other) for other in touched))
    ]


def _issued(op: Op) -> bool:
    return not isinstance(op, ops.Wait | ops.Memory)


def _rounded(program: Program, chance: Random) -> Program | None:
    """What an op reads goes to another dtype and back before it."""
    place = pick(program, chance, _issued)
    if place is None:
        return None
    op = at(program, place)
    assert not isinstance(op, ops.Wait)
    read = [
        region
        for region in _used(program, op, is_written=False)
        if program.buffer_by_name[region.buffer].dtype in _FLOATING
    ]
    if not read:
        return None
    region = chance.choice(read)
    like = program.buffer_by_name[region.buffer]
    dtype = chance.choice([each for each in _FLOATING if each is not like.dtype])
    detour = _temporary(program, like, "detour", dtype)
    there = replace(region, buffer=detour.name)
    return put(
        with_buffers(program, detour),
        place,
        ops.Alloc(buffer=detour.name, stream=op.stream),
        ops.Cast(source=region, destination=there, stream=op.stream),
        ops.Cast(source=there, destination=region, stream=op.stream),
        ops.Release(buffer=detour.name, stream=op.stream),
        op,
    )


def _through_copy(program: Program, chance: Random, *, is_written: bool) -> Program | None:
    """An op reads one of its operands from a copy, or writes one of its results to memory that is copied there."""
    place = pick(program, chance, _issued)
    if place is None:
        return None
    op = at(program, place)
    assert not isinstance(op, ops.Wait)
    used = [r for r in _used(program, op, is_written=is_written) if r.shard is None]
    if not used:
        return None
    region = chance.choice(used)
    like = program.buffer_by_name[region.buffer]
    copy = _temporary(program, like, "copy", like.dtype)
    there = replace(region, buffer=copy.name)

    def moved(each: Region) -> Region:
        return there if each == region else each

    back = ops.Cast(source=there, destination=region, stream=op.stream, event=op.event)
    down = ops.Cast(source=region, destination=there, stream=op.stream)
    both = (
        (map_regions(replace(op, event=None), moved), back)
        if is_written
        else (down, map_regions(op, moved))
    )
    return put(
        with_buffers(program, copy),
        place,
        ops.Alloc(buffer=copy.name, stream=op.stream),
        *both,
        ops.Release(buffer=copy.name, stream=op.stream),
    )


def _overwritten(program: Program, chance: Random) -> Program | None:
    """A scalar, or another buffer at rest, is overwritten between two ops."""
    place = pick(program, chance, _issued)
    at_rest = [
        b
        for b in program.buffers
        if b.is_persistent
        and b.space is Space.DEVICE
        and b.dtype in (DType.F32, DType.F64)
        and (b.role is Role.SCALAR or chance.random() < 0.1)
    ]
    if place is None or not at_rest:
        return None
    op = at(program, place)
    is_device = any(s.name == COMPUTE for s in program.streams)
    stream = COMPUTE if is_device else effects(op).stream
    fill = ops.Fill(
        destination=whole(chance.choice(at_rest)),
        value=chance.choice([0.0, 3.0, float("nan")]),
        stream=stream,
    )
    return put(program, place, op, fill)


def _put_back(program: Program, chance: Random) -> Program | None:
    """A scalar that an op has changed gets its old value again, at the end of the section."""
    place = pick(
        program,
        chance,
        lambda op: any(
            program.buffer_by_name[region.buffer].role is Role.SCALAR
            for region in (*effects(op).writes, *effects(op).accumulates)
        ),
    )
    if place is None:
        return None
    op = at(program, place)
    changed = [
        region
        for region in (*effects(op).writes, *effects(op).accumulates)
        if program.buffer_by_name[region.buffer].role is Role.SCALAR
    ]
    region = chance.choice(changed)
    like = program.buffer_by_name[region.buffer]
    old = _temporary(program, like, "old", like.dtype)
    kept = replace(region, buffer=old.name)
    stream = effects(op).stream
    section = program.sections[place[0]]
    after: list[Op] = [
        ops.Cast(source=kept, destination=region, stream=stream),
        ops.Release(buffer=old.name, stream=stream),
    ]
    body = list(section.body)
    end = chance.choice([place[1] + 1, len(body)])
    body[end:end] = after
    body[place[1] : place[1]] = [
        ops.Alloc(buffer=old.name, stream=stream),
        ops.Cast(source=region, destination=kept, stream=stream),
    ]
    sections = list(program.sections)
    sections[place[0]] = replace(section, body=tuple(body))
    return with_buffers(replace(program, sections=tuple(sections)), old)


# ------------------------------------------------------------------------------------------------------- confusions


def _like_pair(program: Program, chance: Random) -> tuple[str, str] | None:
    """Two buffers of one type and space, both at rest or both temporary."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for buffer in program.buffers:
        if buffer.role is not Role.SNAPSHOT:
            key = (buffer.dtype, buffer.numel, buffer.space, buffer.is_persistent)
            alike.setdefault(key, []).append(buffer.name)
    choices = [names for names in alike.values() if len(names) > 1]
    if not choices:
        return None
    one, other = chance.sample(chance.choice(choices), 2)
    return one, other


def _exchanged(
    program: Program, pair: tuple[str, str], is_wanted: Callable[[str, Op], bool]
) -> Program:
    """Two buffers exchange their places in the ops wanted, which are told with their section's name."""
    names = {pair[0]: pair[1], pair[1]: pair[0]}

    def changed(section: str, op: Op) -> Op:
        if not is_wanted(section, op):
            return op
        if isinstance(op, ops.Memory):
            return replace(op, buffer=names.get(op.buffer, op.buffer))
        return map_regions(op, lambda r: replace(r, buffer=names.get(r.buffer, r.buffer)))

    return replace(
        program,
        sections=tuple(
            replace(s, body=tuple(changed(s.name, op) for op in s.body)) for s in program.sections
        ),
    )


def _confused_kinds(program: Program, chance: Random) -> Program | None:
    """Ops of one to three kinds take two like buffers for one another."""
    pair = _like_pair(program, chance)
    kinds = sorted(
        {type(op) for op in program.ops() if _issued(op)}, key=lambda kind: kind.__name__
    )
    if pair is None or not kinds:
        return None
    chosen = tuple(chance.sample(kinds, min(len(kinds), chance.choice([1, 2, 3]))))
    return _exchanged(program, pair, lambda _, op: isinstance(op, chosen))


def _confused_sections(program: Program, chance: Random) -> Program | None:
    """One section takes two like buffers for one another."""
    pair = _like_pair(program, chance)
    if pair is None:
        return None
    name = chance.choice(program.sections).name
    return _exchanged(program, pair, lambda section, _: section == name)


def _confused_streams(program: Program, chance: Random) -> Program | None:
    """The ops of one stream take two like buffers for one another."""
    pair = _like_pair(program, chance)
    if pair is None:
        return None
    stream = chance.choice(program.streams).name
    return _exchanged(program, pair, lambda _, op: effects(op).stream == stream)


# ------------------------------------------------------------------------------------------------------------ header


def _other_dtype(program: Program, chance: Random) -> Program | None:
    """A buffer that something outside fills has another dtype, also in the segments that read it."""
    filled = [
        *(binding.buffer for binding in program.module_buffers),
        *(binding.buffer for binding in program.inputs),
    ]
    filled = [name for name in filled if name in program.buffer_by_name]
    if not filled:
        return None
    name = chance.choice(filled)
    old = program.buffer_by_name[name].dtype
    # Of one size: bytes in the file must still be as many.
    alike = {DType.F32: DType.I32, DType.I32: DType.F32, DType.I64: DType.F64, DType.F64: DType.I64}
    dtype = chance.choice([alike.get(old, DType.F32), *(d for d in _FLOATING if d is not old)])
    return retyped(program, name, dtype)


def _other_report(program: Program, chance: Random) -> Program | None:
    """The engine reads a quantity from another scalar, or of one it reads nothing, or one that there is not."""
    if not program.reports:
        return None
    report = chance.choice(program.reports)
    others = [r for r in program.reports if r is not report]
    match chance.randrange(3):
        case 0:
            return replace(program, reports=tuple(others))
        case 1:
            scalars = [b.name for b in program.buffers if b.role is Role.SCALAR]
            changed = replace(report, buffer=chance.choice(scalars))
        case _:
            missing = [q for q in Quantity if q not in program.report_of]
            if not missing:
                return None
            added = replace(report, quantity=chance.choice(missing))
            return replace(program, reports=(*program.reports, added))
    return replace(program, reports=tuple(changed if r is report else r for r in program.reports))


def _exchanged_settings(program: Program, chance: Random) -> Program | None:
    """Two groups of the header exchange the buffers of their settings, and with them perhaps their first values."""
    if len(program.groups) < 2:
        return None
    one, other = chance.sample(program.groups, 2)
    groups = tuple(
        replace(group, lr=other.lr, hyper=other.hyper)
        if group is one
        else replace(group, lr=one.lr, hyper=one.hyper)
        if group is other
        else group
        for group in program.groups
    )
    names = {one.lr: other.lr, other.lr: one.lr, one.hyper: other.hyper, other.hyper: one.hyper}
    made = replace(program, groups=groups)
    if chance.random() < 0.5:
        scalars = (replace(s, buffer=names.get(s.buffer, s.buffer)) for s in program.scalars)
        made = replace(made, scalars=tuple(scalars))
    return made


DETOUR_MUTATIONS: Mapping[str, Mutation] = {
    "round-operand": _rounded,
    "read-from-copy": partial(_through_copy, is_written=False),
    "write-to-copy": partial(_through_copy, is_written=True),
    "overwrite-scalar": _overwritten,
    "put-back-scalar": _put_back,
    "confuse-in-kinds": _confused_kinds,
    "confuse-in-section": _confused_sections,
    "confuse-in-stream": _confused_streams,
    "change-outside-dtype": _other_dtype,
    "change-report": _other_report,
    "exchange-settings": _exchanged_settings,
}
