"""Ops by their place in a program, in a few words: what profiles and errors show."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.program import Program


def labels(program: Program) -> dict[int, str]:
    """``section:index`` and a summary of every op, by the identity of the op."""
    return {
        id(op): f"{section.name}:{index} {_summary(op)}"
        for section in program.sections
        for index, op in enumerate(section.body)
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
