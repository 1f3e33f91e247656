"""Which bytes are live after each op of a section, by role: the curve under a peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.effects import effects
from zeroir.ir.program import Program, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Bytes live on one rank over a section, in program order.

    ``roles[r][0]`` are the bytes of the role ``r`` on entry, ``roles[r][i + 1]`` those after op ``i``; only roles that
    are ever live are there, those that hold most at once first. ``workspace[i + 1]`` are the bytes that op ``i`` takes
    beyond its buffers while it runs.
    """

    section: str
    roles: Mapping[Role, Sequence[int]]
    workspace: Sequence[int]

    @property
    def totals(self) -> list[int]:
        """Bytes of all roles and of the workspace, on entry and after (or, for the workspace, during) each op."""
        columns = zip(*self.roles.values(), self.workspace, strict=True)
        return [sum(column) for column in columns]


def live_bytes(
    program: Program, section: Section, *, space: Space = Space.DEVICE, kernels: str = "eager"
) -> LiveBytes:
    """The curve of one section: ops take effect in program order, and each persistent buffer is always live.

    ``kernels`` are those whose declared workspace counts; a segment that declares none for them takes 0.
    """
    names = program.buffer_by_name
    live = dict.fromkeys(Role, 0)
    for buffer in program.buffers:
        if buffer.space is space and (buffer.is_persistent or buffer.name in section.entry.live):
            live[buffer.role] += buffer.size_bytes
    curves: dict[Role, list[int]] = {role: [live[role]] for role in Role}
    workspace = [0]
    for op in section.body:
        effect = effects(op)
        for name in effect.allocs:
            live[names[name].role] += names[name].size_bytes if names[name].space is space else 0
        for name in effect.frees:
            live[names[name].role] -= names[name].size_bytes if names[name].space is space else 0
        for role in Role:
            curves[role].append(live[role])
        workspace.append(_workspace(program, op, kernels) if space is Space.DEVICE else 0)
    present = [role for role in Role if any(curves[role])]
    return LiveBytes(
        section=section.name,
        roles={r: curves[r] for r in sorted(present, key=lambda r: -max(curves[r]))},
        workspace=workspace,
    )


def _workspace(program: Program, op: ops.Op, kernels: str) -> int:
    if not isinstance(op, ops.Compute):
        return 0
    return dict(program.segment_by_name[op.segment].workspace_bytes).get(kernels, 0)
