"""The memory of a rank: persistent buffers, the block of temporary buffers, and the scratch memory of ops.

The fullest moment is that of the worst order of ops that a program allows: streams that no wait orders may run ahead or
lag behind, so more may be live at once than in program order. The runtime allocates the block (the arena) as a whole,
so the total includes all of it, however much of it is live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.ir.segments.segment import Segment
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.memory.placement import Placement, placements
from zeroir.workspace.op_scratch import scratch_bytes, weighing_bytes

WORKSPACE: Final = "workspace"
"""The key of scratch memory among the roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestMoment:
    """The moment with the most live bytes in the worst legal order of ops, and the computation that causes it.

    ``index`` is the op of ``section`` that begins the last of the live buffers, -1 if all of them are live at the
    section's entry; ``section`` is empty if no temporary buffer is ever live. ``unit`` and ``source``
    (``file:line``) are those of the computation that needs the buffer begun by that op, empty if there is none.
    ``role_bytes`` are the bytes live then by role, with scratch memory under ``workspace``, largest first. Where
    ``is_exact`` is False, some order of ops may need more, but never more than ``bound_bytes``.
    """

    section: str
    index: int
    unit: str
    source: str
    role_bytes: Mapping[str, int]
    bound_bytes: int

    @property
    def live_bytes(self) -> int:
        """Bytes of all roles."""
        return sum(self.role_bytes.values())

    @property
    def is_exact(self) -> bool:
        """Whether no legal order of ops needs more."""
        return self.live_bytes == self.bound_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on one rank in one space.

    ``resting_bytes`` are those of persistent buffers, ``arena_bytes`` those of the block of temporary ones, planned or
    not, and ``scratch_bytes`` the maximum that the ops that work in this space need in addition to their buffers,
    summed over all ops that may run at once, or that the weight of a batch needs before them.
    """

    space: Space
    resting_bytes: int
    arena_bytes: int
    scratch_bytes: int
    fullest: FullestMoment

    @property
    def total_bytes(self) -> int:
        """The bytes that a rank's memory must have."""
        return self.resting_bytes + self.arena_bytes + self.scratch_bytes


def footprint(
    program: Program,
    *,
    space: Space = Space.DEVICE,
    kernels: str = "eager",
    place: Callable[[Program], Mapping[Space, Placement]] = placements,
) -> Footprint:
    """Return the footprint of a program whose segments need the workspace that they declare for these kernels.

    ``place`` returns the block of temporary buffers: with ``unplaced`` the footprint is a lower bound, found without
    searching for places. Memory of a backend for collectives is not included: NCCL allocates its own.
    """
    names = program.buffer_by_name

    def has_scratch(op: Op) -> bool:
        return scratch_bytes(program, op, kernels=kernels, space=space) > 0

    lifetimes = Lifetimes.of(program, has_scratch)
    sizes: list[int] = []
    for life, name in enumerate(lifetimes.buffers):
        if name:
            sizes.append(names[name].size_bytes if names[name].space is space else 0)
        else:
            section, index = lifetimes.place(program, lifetimes.firsts[life])
            op = section.body[index]
            sizes.append(scratch_bytes(program, op, kernels=kernels, space=space))
    used = [life for life, size in enumerate(sizes) if size]
    scratch_lives = [life for life in used if not lifetimes.buffers[life]]
    most = most_live(lifetimes, used, sizes)
    resting = {b.name: b for b in program.buffers if b.is_persistent and b.space is space}
    role_bytes: dict[str, int] = {}
    for buffer in resting.values():
        role = buffer.role.value
        role_bytes[role] = role_bytes.get(role, 0) + buffer.size_bytes
    resting_bytes = sum(role_bytes.values())
    for life in most.lives:
        name = lifetimes.buffers[life]
        role = names[name].role.value if name else WORKSPACE
        role_bytes[role] = role_bytes.get(role, 0) + sizes[life]
    section_name, index, unit, source = "", -1, "", ""
    if most.lives:
        section, index = lifetimes.place(program, most.moment)
        section_name = section.name
        unit, source = _blame(program, section, index)
    placement = place(program).get(space)
    # A batch is weighed between sections, while no op with scratch memory runs.
    weighing = weighing_bytes(program) if space is Space.DEVICE else 0
    return Footprint(
        space=space,
        resting_bytes=resting_bytes,
        arena_bytes=0 if placement is None else placement.size_bytes,
        scratch_bytes=max(most_live(lifetimes, scratch_lives, sizes).bound_bytes, weighing),
        fullest=FullestMoment(
            section=section_name,
            index=index,
            unit=unit,
            source=source,
            role_bytes=dict(sorted(role_bytes.items(), key=lambda item: (-item[1], item[0]))),
            bound_bytes=resting_bytes + most.bound_bytes,
        ),
    )


def _blame(program: Program, section: Section, index: int) -> tuple[str, str]:
    """Return unit and model line of an op, or of the computation that first uses the buffer that it begins."""
    if index < 0:
        return "", ""
    op = section.body[index]
    later = section.body[index:]
    if isinstance(op, ops.Alloc):
        later = tuple(user for user in later if op.buffer in _touched(user))
    for user in later:
        if isinstance(user, ops.Compute):
            return user.unit, _source(program.segment_by_name[user.segment])
        if not isinstance(op, ops.Alloc):
            break
    return "", ""


def _touched(op: Op) -> set[str]:
    if not isinstance(op, ops.Compute):
        return set()
    arguments = {argument.view.region.buffer for argument in op.arguments}
    return arguments | {d.view.region.buffer for d in op.destinations if d is not None}


def _source(segment: Segment) -> str:
    """Return the line of the model that computes the largest value of a segment."""
    largest_bytes, source = -1, ""
    for node in segment.nodes:
        size = sum(kind.size_bytes for kind in node.results if kind is not None)
        if node.source and size > largest_bytes:
            largest_bytes, source = size, node.source
    return source
