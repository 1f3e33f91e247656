"""The bytes that the collectives of a program send, and those that its transfers copy.

The bytes of collectives are counted as the ZeRO paper counts communication (Rajbhandari et al. 2020, §7): the bytes of
the full buffer that each collective gathers or reduces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program

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


def collective_bytes(
    program: Program,
    *,
    axis: str | None = None,
    sections: Collection[str] = (LAST_MICRO_STEP, UPDATE),
) -> Mapping[str, int]:
    """Return the bytes of the full buffers of the collectives of some sections, by op.

    By default these are the sections of a step with one micro-step, or one group of micro-batches that run unit by
    unit. With ``axis``, only collectives over that mesh axis are counted.

    An all_gather, or a prefetch, counts its destination; a reduce_scatter, all_reduce or broadcast its source. Each
    counts once, so in the ZeRO paper's terms, where an all-reduce is a reduce-scatter and an all-gather, ``all_reduce``
    counts twice. Collectives over buffers of the role ``scalar`` are counted separately, under ``scalar``.
    """
    totals = dict.fromkeys(COLLECTIVE_KEYS, 0)
    for section in program.sections:
        if section.name not in sections:
            continue
        for op in section.body:
            if not isinstance(op, ops.Collective):
                continue
            if axis is None or program.comm_by_name[op.comm].axis == axis:
                for key, size in payloads(op, program):
                    totals[key] += size
    return totals


TRANSFER_KEYS: Final = ("to_host", "to_device", "load", "store")
"""The keys of :func:`transfer_bytes`."""


def transfer_bytes(
    program: Program, *, sections: Collection[str] = (LAST_MICRO_STEP, UPDATE)
) -> Mapping[str, int]:
    """Return the bytes that the transfers of some sections copy on a rank, by op.

    By default as ``collective_bytes``.
    """
    totals = dict.fromkeys(TRANSFER_KEYS, 0)
    for section in program.sections:
        if section.name not in sections:
            continue
        for op in section.body:
            if isinstance(op, ops.Transfer):
                item = program.buffer_by_name[op.source.buffer].dtype.itemsize_bytes
                totals[ops.op_name(type(op))] += op.source.local_numel(program.mesh) * item
    return totals


def on_the_wire(counted: Mapping[str, int]) -> Mapping[str, int]:
    """Return the paper's volume for the bytes that :func:`collective_bytes` counts: an all_reduce counts twice.

    Stages 0, 1 and 2 result in 2Ψ, and stage 3 without elision in 3Ψ; a rank sends (N-1)/N of it on a ring.
    """
    return {key: 2 * size if key == "all_reduce" else size for key, size in counted.items()}


def payload_bytes(op: ops.CollectiveOp, program: Program) -> int:
    """Return the bytes of all pairs of a collective, in the dtype that is sent."""
    return sum(size for _, size in payloads(op, program))


def payloads(op: ops.CollectiveOp, program: Program) -> Iterator[tuple[str, int]]:
    """Yield for each pair its key of :func:`collective_bytes` and its bytes, in the dtype that is sent."""
    for pair in op.pairs:
        match op:
            case ops.Gather():
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
