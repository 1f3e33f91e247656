"""Copy new parameters to the device during the next step, whose forward waits for those of each unit in turn.

Where the host updates parameters that rest on the device, an update ends with their copies up. Without this pass the
next step begins when all of them are done. With it, the last ops on their stream, those that no other op of the step
waits for, signal events that are pending at all boundaries. The pass manager derives the waits of ops that use the
copied elements, and Z103 and Z105 prove them. So the copies of all units but the first overlap with the forward.

In stages 1 and 2 the devices gather the copied shards, so the copies end with the step.

What ``overlap-uploads`` changes::

      section update {
    + entry %a.param = param a @dp after !to_device.a.param
    + entry pending !to_device.a.param stream=update_in
    - to_device %a.param.host -> %a.param  stream=update_in
    + !to_device.a.param = to_device %a.param.host -> %a.param  stream=update_in
    + exit %a.param = param a @dp after !to_device.a.param
    + exit pending !to_device.a.param stream=update_in
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import Content, FlatContent
from zeroir.ir.ops import IssuedOp, Op
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    UPDATE,
    Holding,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.conflicts import Touched
from zeroir.passes.common.update_streams import UPDATE_IN


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapUploads(Pass):
    """Let the last copies of new parameters to the device run beside the next step."""

    name: ClassVar[str] = "overlap-uploads"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED, Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    def __call__(self, program: Program) -> Program:
        """Return the program with its last copies up pending at all boundaries; unchanged if there are none."""
        uploads = _PendingUploads(program)
        done_within = Touched(program)
        for name in (UPDATE, LAST_MICRO_STEP):
            section = program.section_by_name.get(name)
            # An update in the micro-step leaves no copies to the next section.
            if section is not None and not uploads.arriving:
                uploads.add(section, _last_ops(section, program, done_within))
        return uploads.program() if uploads.arriving else program


def _last_ops(section: Section, program: Program, done_within: Touched) -> Set[int]:
    """Return the last ops of the copies' stream in a section that may be pending at its end.

    ``done_within`` has the ops of the later sections, and gets those of this one that may not be pending: no returned
    op changes what one of these uses, nor what the host uses between steps.
    """
    last_ops: set[int] = set()
    is_last = True
    for index, op in reversed(list(enumerate(section.body))):
        effect = effects(op)
        if is_last and effect.stream == UPDATE_IN:
            used = (*effect.reads, *effect.writes, *effect.accumulates)
            is_of_host = any(
                program.buffer_by_name[region.buffer].role is Role.SCALAR for region in used
            )
            is_last = not (is_of_host or done_within.is_against(op))
            if is_last:
                last_ops.add(index)
                continue
        done_within.add(op, index)
    return last_ops


@dataclass(slots=True)
class _PendingUploads:
    """The events that cross the boundaries, in the order of their ops, and the regions that are complete only then."""

    _program: Program
    _bodies: dict[str, tuple[Op, ...]] = field(default_factory=dict)
    _pending: dict[str, Pending] = field(default_factory=dict)
    arriving: dict[Region, str] = field(default_factory=dict)

    def add(self, section: Section, last_ops: Set[int]) -> None:
        """Make these ops of a section signal events that are pending at its end."""
        self._bodies[section.name] = tuple(
            self._signalling(op)
            if index in last_ops and not isinstance(op, ops.Alloc | ops.Wait)
            else op
            for index, op in enumerate(section.body)
        )

    def _signalling(self, op: IssuedOp) -> Op:
        """Return an op with its own event, which is pending at all boundaries."""
        effect = effects(op)
        changed = (*effect.writes, *effect.accumulates)
        name, *_ = (*(region.buffer for region in changed), *effect.frees)
        stem = f"{ops.op_name(type(op))}.{name}"
        event, number = stem, 0
        while event in self._pending:
            number += 1
            event = f"{stem}.{number}"
        self._pending[event] = Pending(event=event, stream=op.stream)
        for region in changed:
            if self._program.buffer_by_name[region.buffer].is_persistent:
                self.arriving[region] = event
        return replace(op, event=event)

    def program(self) -> Program:
        """Return the program with these ops and events."""
        return rewrite.map_sections(
            self._program,
            lambda section: replace(
                section,
                entry=self._state(section.entry),
                body=self._bodies.get(section.name, section.body),
                exit=self._state(section.exit),
            ),
        )

    def _state(self, state: State) -> State:
        """Return the state at a boundary with these events pending, and each region's content after its event."""
        others = (h for h in state.holdings if not any(h.region.overlaps(r) for r in self.arriving))
        arriving = (
            Holding(region=region, content=_held(region, state, self._program), after=event)
            for region, event in self.arriving.items()
        )
        pending = (*state.pending, *self._pending.values())
        return replace(state, holdings=(*others, *arriving), pending=pending)


def _held(region: Region, state: State, program: Program) -> Content:
    """Return the content of a region of the parameters at rest at a boundary, in the version of the state."""
    resting = rewrite.content_of(region, program)
    contents = [h.content for h in state.holdings if h.region.overlaps(region)]
    versions = [content.version for content in contents if isinstance(content, FlatContent)]
    return replace(resting, version=versions[0]) if versions else resting
