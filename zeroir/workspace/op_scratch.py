"""The memory of an op beyond its buffers while it runs: the workspace of kernels, and temporary tensors of other ops.

Collectives take nothing here: NCCL carries them out in memory of its own, which no program knows.
"""

from __future__ import annotations

from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Algorithm, Mode, Op
from zeroir.ir.program import Program
from zeroir.workspace.segments import EAGER

SQUARES_CHUNK_NUMEL: Final = 1 << 20
"""Squares are summed in pieces of this number of elements, counted from the start of a region.

So the bits depend on the region alone, and the scratch memory does not grow with it.
"""

CONVERTED_CHUNK_NUMEL: Final = 1 << 18
"""Elements that are added in another dtype are converted in pieces of this number."""

AVERAGED_CHUNK_NUMEL: Final = 1 << 20
"""Elements whose moving average is computed together."""

STEPPED_CHUNK_NUMEL: Final = 1 << 18
"""Elements that an optimizer of ours, rather than a kernel of torch, updates together; they fit a cache."""

SCALAR_BYTES: Final = 32
"""No op that decides over scalars has more of them at once than this."""


def scratch_bytes(program: Program, op: Op, *, kernels: str = EAGER) -> int:
    """The most bytes that an op holds at once beside its buffers, on any rank.

    For ops over scalars the figure is a bound, ``SCALAR_BYTES``, and for ``compute`` what its segment declares for
    these kernels, 0 where it declares nothing.
    """
    match op:
        case ops.Compute():
            return dict(program.segment_by_name[op.segment].workspace_bytes).get(kernels, 0)
        case ops.GradNorm():
            return max((_squares_bytes(program, source) for source in op.sources), default=0) + 4
        case ops.CheckFinite():
            return sum(_extremes_bytes(program, source) for source in op.sources) + SCALAR_BYTES
        case ops.Decide() | ops.UpdateScale() | ops.Scale():
            return SCALAR_BYTES
        case ops.Cast() if op.mode is Mode.ACCUMULATE:
            own, wanted = _dtype(program, op.source), _dtype(program, op.destination)
            numel = min(op.destination.local_numel(program.mesh), CONVERTED_CHUNK_NUMEL)
            return 0 if own is wanted else numel * wanted.itemsize_bytes
        case ops.Collective() | ops.Memory() | ops.Wait() | ops.Elementwise() | ops.Transfer():
            return 0
        case ops.OptimizerStep():
            return _step_bytes(program, op)
        case ops.Average():
            chunk = 4 * min(op.average.local_numel(program.mesh), AVERAGED_CHUNK_NUMEL)
            return SCALAR_BYTES + (chunk if op.skip is None else 2 * chunk)
        case _:
            assert_never(op)


def _step_bytes(program: Program, op: ops.OptimizerStep) -> int:
    """Torch's fused kernels need nothing; for the others this is a bound."""
    match op.algorithm:
        case Algorithm.SGD | Algorithm.MOMENTUM | Algorithm.ADAM | Algorithm.ADAMW:
            return 0
        case Algorithm.LION:
            numel = min(op.param.local_numel(program.mesh), STEPPED_CHUNK_NUMEL)
            return 2 * 4 * numel + SCALAR_BYTES
        case _:
            assert_never(op.algorithm)


def _dtype(program: Program, region: Region) -> DType:
    return program.buffer_by_name[region.buffer].dtype


def _squares_bytes(program: Program, source: Region) -> int:
    """One piece squared, in FP32, and its sum."""
    numel = min(source.local_numel(program.mesh), SQUARES_CHUNK_NUMEL)
    converted = 0 if _dtype(program, source) is DType.F32 else 4 * numel
    return 4 * numel + max(converted, 4)


def _extremes_bytes(program: Program, source: Region) -> int:
    """The smallest and the largest element, stacked with those of others, and what tells whether they are finite."""
    return 2 * (_dtype(program, source).itemsize_bytes + 11)
