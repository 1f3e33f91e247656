"""Reduce gradients of 16 bits in FP32 on the wire.

NCCL adds in the dtype that is sent, and rounds at each of the ranks that a sum passes: with many ranks, small
contributions are lost. In FP32 only the result is rounded, to the gradient's dtype, as the ranks of a CPU do anyway.
Each reduction then sends twice the bytes, and needs the memory of an FP32 copy of its gradients while it runs. Sums
over micro-steps are in FP32 already, and stay as they are.

What ``widen-reductions`` changes::

    - reduce_scatter %root.pre.grad_full -> %root.pre.grad  comm=reduce stream=reduce
    + reduce_scatter %root.pre.grad_full -> %root.pre.grad  comm=reduce wire=f32 stream=reduce
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir import ops
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Op, Reduction
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenReductions(Pass):
    """Send what is added in 16 bits as FP32."""

    name: ClassVar[str] = "widen-reductions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS_REDUCED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with FP32 on the wire of each sum of numbers of 16 bits."""
        narrow = {b.name for b in program.buffers if b.dtype in (DType.BF16, DType.F16)}

        def widened(op: Op) -> Op:
            match op:
                case ops.ReduceScatter() | ops.AllReduce() if op.reduction is Reduction.SUM and all(
                    pair.source.buffer in narrow for pair in op.pairs
                ):
                    return replace(op, wire_dtype=DType.F32)
                case _:
                    return op

        return rewrite.map_sections(
            program,
            lambda section: replace(section, body=tuple(widened(op) for op in section.body)),
        )
