"""Ops by their place in a program, in a few words: what profiles and errors show."""

from __future__ import annotations

from collections.abc import Mapping

from zeroir.ir import ops
from zeroir.ir.program import OpPosition, Program


def labels(program: Program) -> Mapping[OpPosition, str]:
    """``section:index`` and a summary of every op, by the op's position."""
    return {
        position: f"{position.section}:{position.index} {_summary(op)}"
        for position, op in program.positioned_ops()
    }


def _summary(op: ops.Op) -> str:
    """An op in a few words: what it is, and of which unit or buffer."""
    match op:
        case ops.Wait():
            return f"wait !{op.waited}"
        case ops.Alloc() | ops.Release():
            return f"{type(op).__name__.lower()} %{op.buffer}"
        case ops.Compute():
            return f"compute @{op.segment} of {op.unit}"
        case (
            ops.AllGather()
            | ops.Prefetch()
            | ops.ReduceScatter()
            | ops.AllReduce()
            | ops.Broadcast()
        ):
            return f"{_WORDS[type(op)]} %{op.pairs[0].source.buffer} -> %{op.pairs[0].destination.buffer}"
        case _:
            return _WORDS[type(op)]


_WORDS: dict[type[ops.Op], str] = {
    ops.AllGather: "all_gather",
    ops.Prefetch: "prefetch",
    ops.ReduceScatter: "reduce_scatter",
    ops.AllReduce: "all_reduce",
    ops.Broadcast: "broadcast",
    ops.Cast: "cast",
    ops.Fill: "fill",
    ops.Scale: "scale",
    ops.GradNorm: "grad_norm",
    ops.CheckFinite: "check_finite",
    ops.Decide: "decide",
    ops.OptimizerStep: "optimizer_step",
    ops.UpdateScale: "update_scale",
    ops.ToHost: "to_host",
    ops.ToDevice: "to_device",
    ops.Load: "load",
    ops.Store: "store",
}
