"""Add section ``save``, which copies the training state to host memory for a checkpoint.

The state is everything that the next step starts with and the host does not provide: of each flat its master weights,
or the parameters where it has none; optimizer states and averages; step counts and loss scales; and the module buffers
that a section writes. Each has a *snapshot*, a persistent buffer in host memory that the runtime allocates at the first
save. Where all ranks along an axis of the mesh have the same elements, each of them copies a slice.

The copies overlap with the next steps, on ``copy_out``. Where steps have other copies there, such as those of
activations, those of a save are on ``save_out``: otherwise the next forward would wait for the whole state. Each copy
signals an event that is pending at all boundaries, so an op that overwrites the source of a copy waits only for this
copy, and only where necessary. The pass manager derives these waits, and Z105 proves them. Copies are in the order in
which the next step overwrites their sources, so a wait for the last copy of a flat covers all of them. Scalars, of a
few bytes, are copied on the compute stream, because the host may change them between steps.

Passes that change which buffers are the state run before it. A program with some of the state on disk is not changed:
host memory may be too small for copies, so training waits until a checkpoint is written from the disk.

What ``save-state`` changes::

    + buffer %a.param.snapshot : f32[256] host snapshot = snapshot %a.param[0:256] event=!saved.a.param
      section update {
    + entry pending !saved.a.param stream=copy_out
    + wait !saved.a.momentum_buffer  on=compute
      optimizer_step momentum param=%a.param grad=%a.grad states=(%a.momentum_buffer) …
    + exit pending !saved.a.param stream=copy_out
    + section save {
    + !saved.a.param = to_host %a.param -> %a.param.snapshot  stream=copy_out
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, assert_never

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.held_elements import held_by_all, is_within, save_order
from zeroir.ir.buffers import Buffer, Region, Role, Space, copied_region, whole
from zeroir.ir.contents import (
    DIRECTION,
    GRAD,
    MASTER,
    PARAM,
    FlatContent,
    SnapshotContent,
)
from zeroir.ir.mesh import COMPUTE, COPY_OUT, OPTIMIZER, Executor, Stream
from zeroir.ir.program import (
    PARAMETER_ALIGNMENT_NUMEL,
    SAVE,
    UPDATE,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite

SAVE_OUT: Final = "save_out"
"""The stream of a save's copies from the device, where ``copy_out`` has copies of steps."""

_PASSING = (GRAD, DIRECTION)
"""Quantities of flats that every step computes anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState(Pass):
    """Add section ``save``, which copies the training state to snapshots in host memory."""

    name: ClassVar[str] = "save-state"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.UNSAVED, Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    def __call__(self, program: Program) -> Program:
        """Return the program with section ``save`` and its snapshots; every section's states have their events."""
        order = _first_writes(program)
        sources = sorted(_state(program), key=lambda b: order.get(b.name, len(order)))
        if any(buffer.space is Space.DISK for buffer in sources):
            return program
        taken = set(program.buffer_by_name)
        snapshots = [_snapshot(buffer, program, taken) for buffer in sources]
        body: list[ops.IssuedOp] = []
        pending: list[Pending] = []
        is_shared = any(effects(op).stream == COPY_OUT for op in program.ops())
        down = SAVE_OUT if is_shared else COPY_OUT
        for buffer, content in snapshots:
            copy = _copy(program.buffer_by_name[content.buffer].space, content, whole(buffer), down)
            body.append(copy)
            if content.event is not None:
                pending.append(Pending(event=content.event, stream=copy.stream))

        def with_pending(state: State) -> State:
            return replace(state, pending=(*state.pending, *pending))

        between = _between_steps(program)
        save = Section(name=SAVE, entry=between, body=tuple(body), exit=between)
        program = replace(
            program,
            streams=_with_streams(program.streams, {op.stream for op in body}),
            buffers=(*program.buffers, *(buffer for buffer, _ in snapshots)),
            sections=(*program.sections, save),
        )
        return rewrite.map_sections(
            program,
            lambda section: replace(
                section, entry=with_pending(section.entry), exit=with_pending(section.exit)
            ),
        )


def _with_streams(streams: tuple[Stream, ...], used: Collection[str]) -> tuple[Stream, ...]:
    """Return the streams, and those that are used but not among them."""
    own = (Stream(name=SAVE_OUT, executor=Executor.DEVICE),) if SAVE_OUT in used else ()
    return (*rewrite.with_streams(streams, used), *own)


def _copy(space: Space, content: SnapshotContent, snapshot: Region, down: str) -> ops.IssuedOp:
    """Return the copy of the region that a snapshot names, in this space, to the snapshot.

    On ``down`` from a device.
    """
    source, event = copied_region(content), content.event
    match space:
        case Space.DEVICE:
            stream = COMPUTE if event is None else down
            return ops.ToHost(source=source, destination=snapshot, stream=stream, event=event)
        case Space.HOST:
            return ops.Cast(source=source, destination=snapshot, stream=OPTIMIZER, event=event)
        case Space.DISK:
            raise InternalError(f"%{source.buffer} is on disk, and there is no copy of it to make")
        case _:
            assert_never(space)


def _between_steps(program: Program) -> State:
    """Return the state between two steps."""
    update = program.section_by_name.get(UPDATE)
    return State() if update is None else update.exit


def _state(program: Program) -> Iterator[Buffer]:
    """Yield the buffers to save, with each element of the state in one of them, in the order of the program."""
    written = set(_first_writes(program))
    has_masters = {
        buffer.holds.flat
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.quantity == MASTER
    }
    covering = {buffer.name for buffer in _covering(program)}
    for buffer in program.buffers:
        is_changed = buffer.role is Role.MODULE_BUFFER and buffer.name in written
        is_state = is_changed or buffer.name in program.counters
        match buffer.holds:
            case FlatContent(quantity=quantity, flat=flat):
                is_cast = quantity == PARAM and flat in has_masters
                is_state = buffer.name in covering and not (quantity in _PASSING or is_cast)
            case _:
                pass
        if is_state:
            yield buffer


def _covering(program: Program) -> Iterator[Buffer]:
    """Yield buffers that together have every element of each quantity of the flats.

    Slices come before copies, and among these buffers in host memory before others. A buffer is omitted if another
    one has all of its elements.
    """
    flats = [(b, b.holds) for b in program.buffers if isinstance(b.holds, FlatContent)]
    covered: dict[tuple[str, str], list[tuple[range, ...]]] = {}
    for buffer, content in sorted(flats, key=save_order):
        coverings = covered.setdefault((content.flat, content.quantity), [])
        elements = held_by_all(content, buffer.numel, program.mesh)
        if not any(is_within(elements, covering) for covering in coverings):
            coverings.append(elements)
            yield buffer


def _first_writes(program: Program) -> dict[str, int]:
    """Return the persistent buffers that the ops of a step write, numbered in the order of their first writes."""
    order: dict[str, int] = {}
    for op in program.step_ops():
        effect = effects(op)
        for region in (*effect.writes, *effect.accumulates):
            order.setdefault(region.buffer, len(order))
    return order


def _snapshot(buffer: Buffer, program: Program, taken: set[str]) -> tuple[Buffer, SnapshotContent]:
    """Return the snapshot of a buffer, with a name that is not ``taken``, and its resting content."""
    name = rewrite.claimed_name(f"{buffer.name}.snapshot", taken)
    region = _own_part(buffer, program)
    content = SnapshotContent(
        buffer=region.buffer,
        offset=region.offset,
        numel=region.numel,
        shard=region.shard,
        event=None if buffer.role is Role.SCALAR else f"saved.{buffer.name}",
    )
    snapshot = Buffer(
        name=name,
        dtype=buffer.dtype,
        numel=region.local_numel(program.mesh),
        space=Space.HOST,
        role=Role.SNAPSHOT,
        holds=content,
    )
    return snapshot, content


def _own_part(buffer: Buffer, program: Program) -> Region:
    """Return the part of a buffer that each rank copies: a slice along the first axis with equal elements."""
    if isinstance(buffer.holds, FlatContent):
        for axis in program.mesh.axes:
            is_alike = axis.name != buffer.holds.shard and axis.size > 1
            if is_alike and buffer.numel % (axis.size * PARAMETER_ALIGNMENT_NUMEL) == 0:
                return replace(whole(buffer), shard=axis.name)
    return whole(buffer)
