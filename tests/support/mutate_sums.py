"""Damages to what ops add up, and to operands that must not meet: wrong by a rounding, or by an overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, redirected, with_buffers
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import GRAD, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import (
    Program,
    Section,
    State,
)
from zeroir.passes.common.rewrite import map_regions

# ----------------------------------------------------------------------------------------------------------- operands


def _one_operand_twice(program: Program, chance: Random) -> Program | None:
    """An op of the update has one region as two of its operands, into which both were copied."""
    places = [
        (s, i)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if isinstance(op, ops.Decide | ops.OptimizerStep | ops.UpdateScale | ops.GradNorm)
    ]
    if not places:
        return None
    at, line = chance.choice(places)
    section = program.sections[at]
    op = section.body[line]
    regions: list[Region] = []

    def note(region: Region) -> Region:
        regions.append(region)
        return region

    map_regions(op, note)
    buffers = program.buffer_by_name
    pairs = [
        (a, b)
        for a in regions
        for b in regions
        if a.buffer != b.buffer
        and (a.numel, buffers[a.buffer].dtype, buffers[a.buffer].space)
        == (b.numel, buffers[b.buffer].dtype, buffers[b.buffer].space)
    ]
    if not pairs or isinstance(op, ops.Wait):
        return None
    one, other = chance.choice(pairs)
    alike = map_regions(op, lambda region: other if region == one else region)
    copy = ops.Cast(source=one, destination=other, stream=op.stream)
    body = list(section.body)
    body[line : line + 1] = [copy, alike] if chance.random() < 0.5 else [alike]
    sections = list(program.sections)
    sections[at] = replace(section, body=tuple(body))
    return replace(program, sections=tuple(sections))


def _step_with_used_gradient(program: Program, chance: Random) -> Program | None:
    """A second copy of a flat's parameters and states is stepped with the same gradient, and read by an op."""
    places = [
        (s, i, op)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if isinstance(op, ops.OptimizerStep)
    ]
    if not places:
        return None
    at, line, op = chance.choice(places)
    names = [region.buffer for region in (op.param, *op.states)]
    twins = {name: f"{name}.twin" for name in names}
    buffers = [replace(program.buffer_by_name[name], name=twins[name]) for name in names]
    second = replace(
        op,
        param=replace(op.param, buffer=twins[op.param.buffer]),
        states=tuple(replace(state, buffer=twins[state.buffer]) for state in op.states),
        event=None,
    )
    section = program.sections[at]
    pair = (second, op) if chance.random() < 0.5 else (op, second)
    body = (*section.body[:line], *pair, *section.body[line + 1 :])
    sections = list(program.sections)
    sections[at] = replace(section, body=body)
    made = with_buffers(replace(program, sections=tuple(sections)), *buffers)
    return redirected(made, chance, op.param.buffer, twins[op.param.buffer])


# --------------------------------------------------------------------------------------------------------------- sums


def _reassociated(program: Program, chance: Random) -> Program | None:
    """What a gradient holds so far goes into the sum over micro-steps before the next contribution is added."""
    places: list[tuple[int, int, ops.Cast]] = []
    for s, section in enumerate(program.sections):
        for line, op in enumerate(section.body):
            if not isinstance(op, ops.Compute):
                continue
            for destination in op.destinations:
                if destination is None or destination.mode is not Mode.ACCUMULATE:
                    continue
                places += [
                    (s, line, later)
                    for later in section.body[line:]
                    if isinstance(later, ops.Cast)
                    and later.mode is Mode.ACCUMULATE
                    and later.source.buffer == destination.view.region.buffer
                ]
    if not places:
        return None
    at, line, cast_op = chance.choice(places)
    section = program.sections[at]
    call = section.body[line]
    assert isinstance(call, ops.Compute)
    source = cast_op.source.buffer
    destinations = tuple(
        replace(d, mode=Mode.WRITE) if d is not None and d.view.region.buffer == source else d
        for d in call.destinations
    )
    early = replace(cast_op, stream=call.stream, event=None)
    fill = ops.Fill(destination=cast_op.source, value=0.0, stream=call.stream)
    body = list(section.body)
    body[line : line + 1] = [early, fill, replace(call, destinations=destinations)]
    sections = list(program.sections)
    sections[at] = replace(section, body=tuple(body))
    return replace(program, sections=tuple(sections))


def _narrow_sum(program: Program, chance: Random) -> Program | None:
    """A sum over micro-steps is kept in 16 bits, and widened where it is stepped with."""
    sums = [
        b
        for b in program.buffers
        if b.dtype is DType.F32 and isinstance(b.holds, FlatContent) and b.holds.quantity == GRAD
    ]
    if not sums:
        return None
    old = chance.choice(sums)
    narrow = replace(old, name=f"{old.name}.narrow", dtype=DType.BF16)
    wide = replace(old, holds=None)

    def narrowed(region: Region) -> Region:
        return replace(region, buffer=narrow.name) if region.buffer == old.name else region

    def told(state: State) -> State:
        holdings = (replace(h, region=narrowed(h.region)) for h in state.holdings)
        return replace(state, holdings=tuple(holdings))

    def changed(section: Section) -> Section:
        body: list[Op] = []
        for op in section.body:
            if isinstance(op, ops.OptimizerStep) and op.grad.buffer == old.name:
                source = narrowed(op.grad)
                body += [
                    ops.Alloc(buffer=old.name, stream=op.stream),
                    ops.Cast(source=source, destination=op.grad, stream=op.stream),
                    op,
                    ops.Release(buffer=old.name, stream=op.stream),
                ]
            else:
                body.append(map_regions(op, narrowed))
        return replace(
            section, entry=told(section.entry), body=tuple(body), exit=told(section.exit)
        )

    buffers = (wide if b is old else b for b in program.buffers)
    return replace(
        program,
        buffers=(*buffers, narrow),
        sections=tuple(changed(section) for section in program.sections),
    )


def _norm_order(program: Program, chance: Random) -> Program | None:
    """A norm reads its sources in another order, or one of them in two pieces."""
    places = [
        (s, i, op)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if isinstance(op, ops.GradNorm) and op.sources
    ]
    if not places:
        return None
    at, line, op = chance.choice(places)
    sources = list(op.sources)
    if chance.random() < 0.5:
        chance.shuffle(sources)
    else:
        which = chance.randrange(len(sources))
        source = sources[which]
        if source.shard is not None or source.numel < 2:
            return None
        cut = chance.randrange(1, source.numel)
        sources[which : which + 1] = [
            replace(source, numel=cut),
            replace(source, offset=source.offset + cut, numel=source.numel - cut),
        ]
    section = program.sections[at]
    new = replace(op, sources=tuple(sources))
    body = (*section.body[:line], new, *section.body[line + 1 :])
    sections = list(program.sections)
    sections[at] = replace(section, body=body)
    return replace(program, sections=tuple(sections))


def _cut_step(program: Program, chance: Random) -> Program | None:
    """An optimizer step in two pieces."""
    places = [
        (s, i, op)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if isinstance(op, ops.OptimizerStep)
        and all(r.shard is None and r.numel > 1 for r in (op.param, op.grad, *op.states))
    ]
    if not places:
        return None
    at, line, op = chance.choice(places)
    cut = chance.choice([chance.randrange(1, op.param.numel), 64 % op.param.numel or 1])

    def first(region: Region) -> Region:
        return replace(region, numel=cut)

    def rest(region: Region) -> Region:
        return replace(region, offset=region.offset + cut, numel=region.numel - cut)

    pieces = [
        replace(
            op,
            param=of(op.param),
            grad=of(op.grad),
            states=tuple(map(of, op.states)),
            event=None if of is first else op.event,
        )
        for of in (first, rest)
    ]
    section = program.sections[at]
    body = (*section.body[:line], *pieces, *section.body[line + 1 :])
    sections = list(program.sections)
    sections[at] = replace(section, body=body)
    return replace(program, sections=tuple(sections))


SUM_MUTATIONS: Mapping[str, Mutation] = {
    "alias-operands": _one_operand_twice,
    "step-with-used-gradient": _step_with_used_gradient,
    "reassociate": _reassociated,
    "narrow-sum": _narrow_sum,
    "change-norm-order": _norm_order,
    "cut-step": _cut_step,
}
