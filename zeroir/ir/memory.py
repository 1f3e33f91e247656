"""How many bytes a program keeps, sends, and needs at its peak, on one rank.

Model states follow the ZeRO paper (Rajbhandari et al. 2020, §3.1): parameters, gradients, and the
optimizer's master weights and moments, counted in padded elements. Communication is counted as the
paper counts it (§7): the bytes of the full buffer that each collective gathers or reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.effects import effects
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program

MODEL_STATE_ROLES: Final = (Role.PARAM, Role.GRAD, Role.MASTER, Role.STATE)
"""The roles of the ZeRO paper's model states."""

SCALAR: Final = "scalar"
"""The key of the bytes of collectives over scalar buffers: the loss, the norm, the overflow flag."""

COLLECTIVE_KEYS: Final = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    SCALAR,
)
"""The keys of :func:`collective_bytes`."""


def model_state_bytes(program: Program) -> Mapping[str, int]:
    """Bytes on one rank of the persistent parameters, gradients, master weights and states, by role.

    Buffers count wherever they live, on the device, the host or a disk.
    """
    found = {role.value: 0 for role in MODEL_STATE_ROLES}
    for buffer in program.buffers:
        if buffer.is_persistent and buffer.role in MODEL_STATE_ROLES:
            found[buffer.role.value] += buffer.size_bytes
    return found


def collective_bytes(program: Program, *, axis: str | None = None) -> Mapping[str, int]:
    """Bytes of the full buffers that the collectives of one step with one micro-step handle, by op.

    With ``axis``, of those over that mesh axis alone.

    An all_gather counts its destination, and so does a prefetch, which is one; a reduce_scatter,
    all_reduce or broadcast its source. Each counts once, so in the ZeRO paper's terms, where reducing
    everywhere is a reduce-scatter and an all-gather, ``all_reduce`` counts twice. What concerns
    buffers of the role ``scalar`` stands apart, under ``scalar``.
    """
    found = dict.fromkeys(COLLECTIVE_KEYS, 0)
    for section in program.sections:
        if section.name not in (LAST_MICRO_STEP, UPDATE):
            continue
        for op in section.body:
            if not isinstance(op, ops.Collective):
                continue
            if axis is None or program.comm_by_name[op.comm].axis == axis:
                for key, size in payloads(op, program):
                    found[key] += size
    return found


def payloads(op: ops.Collective, program: Program) -> Iterator[tuple[str, int]]:
    """For each pair its key of :func:`collective_bytes` and its bytes, of the dtype that travels."""
    for pair in op.pairs:
        match op:
            case ops.AllGather() | ops.Prefetch():
                key, region = "all_gather", pair.destination
            case ops.ReduceScatter():
                key, region = "reduce_scatter", pair.source
            case ops.AllReduce():
                key, region = "all_reduce", pair.source
            case ops.Broadcast():
                key, region = "broadcast", pair.source
            case _:
                assert_never(op)
        buffer = program.buffer_by_name[region.buffer]
        dtype = buffer.dtype if op.wire_dtype is None else op.wire_dtype
        size = region.local_numel(program.mesh) * dtype.itemsize_bytes
        yield SCALAR if buffer.role is Role.SCALAR else key, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The fullest moment: after op number ``index`` of ``section``, or on its entry where ``index`` is -1.

    ``role_bytes`` are the bytes live then on one rank's device, by role, largest first.
    """

    section: str
    index: int
    role_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all roles."""
        return sum(self.role_bytes.values())


def peak(program: Program, *, space: Space = Space.DEVICE) -> Peak:
    """The first fullest moment when ops take effect in program order.

    An estimate: a release on a stream that lags behind keeps its memory longer, and neither a
    segment's workspace nor the allocator's rounding is counted.
    """
    names = program.buffer_by_name
    resting = [b for b in program.buffers if b.is_persistent and b.space is space]
    fullest = Peak(section="", index=-1, role_bytes=_by_role(resting))
    for section in program.sections:
        live = {name: names[name] for name in section.entry.live if names[name].space is space}
        total = sum(b.size_bytes for b in resting) + sum(b.size_bytes for b in live.values())
        best, best_index, best_live = total, -1, list(live.values())
        for index, op in enumerate(section.body):
            effect = effects(op)
            for name in effect.frees:
                freed = live.pop(name, None)
                total -= 0 if freed is None else freed.size_bytes
            for name in effect.allocs:
                if name not in live and names[name].space is space:
                    live[name] = names[name]
                    total += names[name].size_bytes
            if total > best:
                best, best_index, best_live = total, index, list(live.values())
        if best > fullest.total_bytes or not fullest.section:
            role_bytes = _by_role(resting + best_live)
            fullest = Peak(section=section.name, index=best_index, role_bytes=role_bytes)
    return fullest


def _by_role(buffers: list[Buffer]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for buffer in buffers:
        found[buffer.role.value] = found.get(buffer.role.value, 0) + buffer.size_bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
