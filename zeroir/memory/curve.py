"""The live bytes over a section when ops take effect in program order, by role, and their peak.

Sizes that depend on dims count at the bound. This is the step in program order. ``zeroir.memory.footprint`` computes
what must fit: streams that no wait orders may make more live at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Role, Space
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import SECTION_NAMES, STEP_SECTIONS, Program, Section
from zeroir.workspace.op_scratch import scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Bytes live on one rank over a section, in program order.

    ``roles[r][0]`` are the bytes of the role ``r`` on entry, ``roles[r][i + 1]`` those after op ``i``; only roles that
    are ever live are listed, in order of their maximum bytes. ``workspace[i + 1]`` are the bytes that op ``i`` needs in
    addition to its buffers while it runs.
    """

    section: str
    roles: Mapping[Role, Sequence[int]]
    workspace: Sequence[int]

    @property
    def buffers(self) -> list[int]:
        """Bytes of all roles, on entry and after each op."""
        return _sums(self.roles.values(), len(self.workspace))

    @property
    def totals(self) -> list[int]:
        """Bytes of all roles and of the workspace, on entry and after (or, for the workspace, during) each op."""
        return _sums((*self.roles.values(), self.workspace), len(self.workspace))


def live_bytes(
    program: Program, section: Section, *, space: Space = Space.DEVICE, kernels: str = "eager"
) -> LiveBytes:
    """Return the curve of one section: ops take effect in program order, and each persistent buffer is always live.

    ``kernels`` are those whose declared workspace counts; a segment that declares none for them counts as 0.
    Collectives count the copies in the dtype that is sent; other memory of a backend is unknown to a program.
    """
    names = program.buffer_by_name
    count = len(section.body) + 1
    changes: dict[Role, list[int]] = {}

    def change(name: str, at: int, sign: int) -> None:
        buffer = names[name]
        if buffer.space is space:
            changes.setdefault(buffer.role, [0] * count)[at] += sign * int(buffer.size_bytes)

    entered = set(section.entry.live)
    for buffer in program.buffers:
        if buffer.is_persistent or buffer.name in entered:
            change(buffer.name, 0, 1)
    workspace = [0] * count
    for at, op in enumerate(section.body, start=1):
        effect = effects(op)
        for name in effect.allocs:
            change(name, at, 1)
        for name in effect.frees:
            change(name, at, -1)
        workspace[at] = int(scratch_bytes(program, op, kernels=kernels, space=space))
    curves = {role: list(accumulate(changes[role])) for role in Role if role in changes}
    return LiveBytes(
        section=section.name,
        roles={role: curves[role] for role in sorted(curves, key=lambda r: -max(curves[r]))},
        workspace=workspace,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The time with the most live bytes: after op number ``index`` of ``section``, or on its entry where it is -1.

    ``role_bytes`` are the bytes live then on one rank in one space, by role, largest first.
    """

    section: str
    index: int
    role_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all roles."""
        return sum(self.role_bytes.values())


def peak(
    program: Program,
    *,
    space: Space = Space.DEVICE,
    sections: Collection[str] = SECTION_NAMES,
) -> Peak:
    """Return the first maximum of the curves of these sections, without the workspaces of ops."""
    fullest = Peak(section="", index=-1, role_bytes={})
    for section in program.sections:
        if section.name not in sections:
            continue
        curve = live_bytes(program, section, space=space)
        buffers = curve.buffers
        most = max(buffers)
        if most > fullest.total_bytes or not fullest.section:
            at = buffers.index(most)
            role_bytes = {role.value: sizes[at] for role, sizes in curve.roles.items() if sizes[at]}
            by_size = sorted(role_bytes.items(), key=lambda item: (-item[1], item[0]))
            fullest = Peak(section=section.name, index=at - 1, role_bytes=dict(by_size))
    return fullest


def peak_text(program: Program) -> str:
    """Return the peak of a step in words: ``peak buffers 3.2 GB per rank``."""
    return (
        f"peak buffers {format_bytes(peak(program, sections=STEP_SECTIONS).total_bytes)} per rank"
    )


def _sums(columns: Iterable[Sequence[int]], count: int) -> list[int]:
    """Return the sums of the columns at each of ``count`` places."""
    return [sum(row) for row in zip([0] * count, *columns, strict=True)]
