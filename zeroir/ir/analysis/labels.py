"""Short names of ops by their place in a program, for profiles and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.program import OpPosition, Program


def labels(program: Program) -> Mapping[OpPosition, str]:
    """Return ``section:index`` and a summary of every op, by the op's position."""
    return {
        position: f"{position.section}:{position.index} {_summary(op)}"
        for position, op in program.positioned_ops()
    }


def _summary(op: ops.Op) -> str:
    """Return a summary of an op: its name, and its unit or buffer."""
    keyword = ops.op_name(type(op))
    match op:
        case ops.Wait():
            return f"{keyword} !{op.waited}"
        case ops.Memory():
            return f"{keyword} %{op.buffer}"
        case ops.Compute():
            return f"{keyword} @{op.segment} of {op.unit}"
        case ops.Collective():
            first = op.pairs[0]
            return f"{keyword} %{first.source.buffer} -> %{first.destination.buffer}"
        case ops.Elementwise() | ops.Update() | ops.Transfer():
            return keyword
        case _:
            assert_never(op)
