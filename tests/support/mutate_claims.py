"""Damages to what a program claims: its types, contents, roles, places and states.

Each is a way in which a program could be proved and still compute something else, if some part of the proof believed
what is declared. They are mutations as in ``mutate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import cast

from tests.support.edits import Mutation, redirected, with_buffers
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Communicator
from zeroir.ir.ops import Op
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import (
    EVALUATE,
    Holding,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.ir.segments.segment import Node, Ref, Segment
from zeroir.ir.segments.views import is_view
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.verify.order.pending_events import SECTION_BOUNDARIES

# ---------------------------------------------------------------------------------------------------------- segments


def _with_segment(program: Program, old: Segment, new: Segment) -> Program:
    segments = tuple(new if segment is old else segment for segment in program.segments)
    return replace(program, segments=segments)


def _with_node(
    program: Program,
    chance: Random,
    is_wanted: Callable[[Node], bool],
    change: Callable[[Node], Node | None],
) -> Program | None:
    """The program with one node of one of its segments changed."""
    places = [
        (segment, number)
        for segment in program.segments
        for number, node in enumerate(segment.nodes)
        if is_wanted(node)
    ]
    if not places:
        return None
    segment, number = chance.choice(places)
    node = change(segment.nodes[number])
    if node is None or node == segment.nodes[number]:
        return None
    nodes = (*segment.nodes[:number], node, *segment.nodes[number + 1 :])
    return _with_segment(program, segment, replace(segment, nodes=nodes))


def _other_view(program: Program, chance: Random) -> Program | None:
    """A view by another operator, with the type that the right one has."""

    def change(node: Node) -> Node:
        rank = len(node.results[0].shape) if node.results[0] else 0
        order = list(range(rank))
        chance.shuffle(order)
        choices = [
            ("aten.alias.default", node.args[:1]),
            ("aten.transpose.int", (*node.args[:1], 0, chance.choice([0, -1]))),
            ("aten.permute.default", (*node.args[:1], tuple(order))),
        ]
        op, args = chance.choice(choices)
        return replace(node, op=op, args=args)

    return _with_node(program, chance, lambda n: is_view(n.op) and len(n.results) == 1, change)


def _declared_type(program: Program, chance: Random) -> Program | None:
    """A result of another shape, other strides or another dtype than its operator makes."""

    def change(node: Node) -> Node | None:
        at = chance.randrange(len(node.results))
        kind = node.results[at]
        if kind is None:
            return None
        stride = list(kind.stride)
        chance.shuffle(stride)
        other = chance.choice(
            [
                replace(kind, shape=kind.shape[::-1]),
                replace(kind, stride=tuple(stride)),
                replace(kind, stride=tuple(step + 1 for step in kind.stride)),
                replace(kind, dtype=chance.choice([DType.F32, DType.BF16, DType.I64])),
            ]
        )
        return replace(node, results=(*node.results[:at], other, *node.results[at + 1 :]))

    return _with_node(program, chance, lambda node: bool(node.results), change)


_ALIKE = (
    ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"),
    ("aten.relu.default", "aten.neg.default", "aten.alias.default", "aten.clone.default"),
    ("aten.mm.default", "zeroir.mm_out.default"),
)


def _other_operator(program: Program, chance: Random) -> Program | None:
    """Another operator of the same signature."""
    groups = {op: group for group in _ALIKE for op in group}

    def change(node: Node) -> Node:
        return replace(node, op=chance.choice(groups[node.op]))

    return _with_node(program, chance, lambda node: node.op in groups, change)


def _writing_node(program: Program, chance: Random) -> Program | None:
    """A node that writes one of the segment's values over another one."""
    segment = chance.choice(program.segments)
    kinds = segment.types()
    pairs = [
        (i, j)
        for i, one in enumerate(kinds)
        for j, other in enumerate(kinds)
        if i != j and one is not None and one == other
    ]
    if not pairs:
        return None
    target, source = chance.choice(pairs)
    op = chance.choice(["zeroir.store.default", "aten.copy_.default"])
    node = Node(op=op, args=(Ref(target), Ref(source)), results=())
    return _with_segment(program, segment, replace(segment, nodes=(*segment.nodes, node)))


# ------------------------------------------------------------------------------------------------ buffers and contents


def _twin(program: Program, chance: Random) -> Program | None:
    """A second buffer that rests with the same content, and that an op uses in place of the first."""
    old = chance.choice([b for b in program.buffers if b.holds is not None])
    holds = old.holds
    if isinstance(holds, NamedContent) and chance.random() < 0.3:
        holds = replace(holds, version=1)
    new = replace(old, name=f"{old.name}.twin", holds=holds)
    scalars = program.scalars
    if chance.random() < 0.5:
        scalars = (
            *scalars,
            *(replace(s, buffer=new.name) for s in scalars if s.buffer == old.name),
        )
    made = with_buffers(replace(program, scalars=scalars), new)
    return redirected(made, chance, old.name, new.name)


def _claimed(program: Program, chance: Random) -> Program | None:
    """A temporary buffer that is said to hold a content over the boundary between two steps; an op reads it there."""
    old = chance.choice([b for b in program.buffers if b.holds is not None])
    assert old.holds is not None
    new = replace(old, name=f"{old.name}.claimed", holds=None, role=Role.ACTIVATION)
    holding = Holding(region=whole(new), content=old.holds)

    def told(state: State) -> State:
        return replace(state, live=(*state.live, new.name), holdings=(*state.holdings, holding))

    sections = (replace(s, entry=told(s.entry), exit=told(s.exit)) for s in program.sections)
    made = with_buffers(replace(program, sections=tuple(sections)), new)
    return redirected(made, chance, old.name, new.name)


def _role(program: Program, chance: Random) -> Program | None:
    old = chance.choice(program.buffers)
    new = replace(old, role=chance.choice(list(Role)))
    return replace(program, buffers=tuple(new if b is old else b for b in program.buffers))


def _place(program: Program, chance: Random) -> Program | None:
    """A buffer of a planned program stands somewhere else."""
    if all(buffer.offset is None for buffer in program.buffers):
        program = PlanMemory()(program)
    placed = [b for b in program.buffers if b.offset is not None]
    if not placed:
        return None
    old = chance.choice(placed)
    assert old.offset is not None
    others = [b.offset for b in placed if b.offset is not None and b.space is old.space]
    moves = [old.offset + by for by in (-64, -4, 2, 4, 16, 64)]
    new = replace(old, offset=chance.choice([*others, *(at for at in moves if at >= 0)]))
    return replace(program, buffers=tuple(new if b is old else b for b in program.buffers))


def _header(program: Program, chance: Random) -> Program | None:
    """Flats, groups, options and seeds say something else."""
    match chance.randrange(4):
        case 0:
            old = chance.choice(program.flats)
            dtype = chance.choice([DType.F32, DType.BF16, DType.F16])
            flats = (replace(f, dtype=dtype) if f is old else f for f in program.flats)
            return replace(program, flats=tuple(flats))
        case 1:
            count = chance.randrange(1, 6)
            options = WrittenOptions.of({**program.options.texts, "micro_steps": str(count)})
            divisor = count * program.mesh.world_size

            def told(section: Section) -> Section:
                body = (
                    replace(op, divisor=divisor) if isinstance(op, ops.Decide) else op
                    for op in section.body
                )
                return replace(section, body=tuple(body))

            sections = tuple(told(section) for section in program.sections)
            return replace(program, options=options, sections=sections)
        case 2:
            old = chance.choice(program.flats)
            slots = list(old.slots)
            at = chance.randrange(len(slots))
            slots[at] = replace(slots[at], offset=slots[at].offset + chance.choice([1, 8, 64]))
            flats = (replace(f, slots=tuple(slots)) if f is old else f for f in program.flats)
            return replace(program, flats=tuple(flats))
        case _:
            seeds = [b for b in program.buffers if b.role is Role.RNG]
            if not seeds:
                return None
            longer = replace(seeds[0], numel=seeds[0].numel + 1)
            return replace(
                program, buffers=tuple(longer if b is seeds[0] else b for b in program.buffers)
            )


# ----------------------------------------------------------------------------------------------------------- boundaries


def _deferred(program: Program, chance: Random) -> Program | None:
    """An op is still under way when its section is over: what follows waits for it, or does not, or passes it on."""
    section = chance.choice(program.sections)
    candidates = [i for i, op in enumerate(section.body) if not isinstance(op, ops.Wait)]
    if not candidates:
        return None
    last = candidates[-1] if chance.random() < 0.5 else chance.choice(candidates)
    op = section.body[last]
    assert not isinstance(op, ops.Wait)
    event = op.event or "deferred"
    pending = Pending(event=event, stream=op.stream)
    body = (
        *section.body[:last],
        cast("Op", replace(op, event=event)),
        *section.body[last + 1 :],
    )
    streams = [s.name for s in program.streams]
    passes_on = chance.random() < 0.4
    followers = {second for first, second in SECTION_BOUNDARIES if first == section.name}
    written = _written(op)

    def after(state: State) -> State:
        holdings = tuple(
            replace(h, after=event) if h.region.buffer in written else h for h in state.holdings
        )
        told = {h.region.buffer for h in holdings}
        resting = tuple(
            Holding(region=whole(buffer), content=buffer.holds, after=event)
            for buffer in program.buffers
            if buffer.name in written - told and buffer.holds is not None
        )
        return replace(state, holdings=(*holdings, *resting), pending=(*state.pending, pending))

    sections: list[Section] = []
    for one in program.sections:
        new = one
        if one.name == section.name:
            new = replace(new, body=body, exit=after(new.exit))
        if one.name in followers or passes_on:
            wait = ops.Wait(waited=event, on=chance.choice(streams))
            waits: tuple[Op, ...] = () if chance.random() < 0.2 else (wait,)
            new = replace(new, entry=after(new.entry), body=(*waits, *new.body))
        if passes_on and one.name != section.name:
            new = replace(new, exit=after(new.exit))
        sections.append(new)
    return replace(program, sections=tuple(sections))


def _written(op: Op) -> set[str]:
    from zeroir.ir.analysis.effects import effects

    seen = effects(op)
    return {region.buffer for region in (*seen.writes, *seen.accumulates)}


def _renamed_events(program: Program, chance: Random) -> Program | None:
    """Two events of one section change names, but for what its states say of them."""
    section = chance.choice(program.sections)
    names = [
        op.event for op in section.body if not isinstance(op, ops.Wait) and op.event is not None
    ]
    names += [pending.event for pending in section.entry.pending]
    if len(set(names)) < 2:
        return None
    one, other = chance.sample(sorted(set(names)), 2)
    swapped = {one: other, other: one}

    def renamed(op: Op) -> Op:
        if isinstance(op, ops.Wait):
            return replace(op, waited=swapped.get(op.waited, op.waited))
        if op.event is None:
            return op
        return cast("Op", replace(op, event=swapped.get(op.event, op.event)))

    body = tuple(renamed(op) for op in section.body)
    sections = (replace(s, body=body) if s is section else s for s in program.sections)
    return replace(program, sections=tuple(sections))


def _other_communicator(program: Program, chance: Random) -> Program | None:
    """Collectives of one section run over a communicator of their own."""
    if not program.comms:
        return None
    section = chance.choice(program.sections)
    old = chance.choice(program.comms)
    new = Communicator(name=f"{old.name}.other", axis=old.axis)
    kinds = ops.AllGather | ops.Prefetch | ops.ReduceScatter | ops.AllReduce | ops.Broadcast
    body = tuple(
        replace(op, comm=new.name) if isinstance(op, kinds) and op.comm == old.name else op
        for op in section.body
    )
    if body == section.body:
        return None
    sections = (replace(s, body=body) if s is section else s for s in program.sections)
    return replace(program, comms=(*program.comms, new), sections=tuple(sections))


def _wrong_evaluation(program: Program, chance: Random) -> Program | None:
    """An evaluation leaves something else behind than its loss."""
    section = program.section_by_name.get(EVALUATE)
    if section is None:
        return None
    target = chance.choice([b for b in program.buffers if b.holds and b.space is Space.DEVICE])
    fill = ops.Fill(destination=whole(target), value=chance.choice([0.0, 2.0]), stream="compute")
    body = (*section.body, fill)
    sections = (replace(s, body=body) if s is section else s for s in program.sections)
    return replace(program, sections=tuple(sections))


CLAIM_MUTATIONS: Mapping[str, Mutation] = {
    "other-view": _other_view,
    "declare-type": _declared_type,
    "other-operator": _other_operator,
    "write-in-segment": _writing_node,
    "twin-buffer": _twin,
    "claim-content": _claimed,
    "change-role": _role,
    "move-place": _place,
    "change-header": _header,
    "defer-op": _deferred,
    "rename-events": _renamed_events,
    "other-communicator": _other_communicator,
    "spoil-evaluation": _wrong_evaluation,
}
