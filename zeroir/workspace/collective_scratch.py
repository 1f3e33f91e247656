"""What an op takes beyond its buffers while it runs on a CPU: the workspace of kernels and of everything else.

A collective's share is that of the gloo backend, which on one rank alone is a copy; NCCL has memory of its own that a
program knows nothing of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Program
from zeroir.workspace.promotion import promoted
from zeroir.workspace.segments import EAGER

SQUARES_CHUNK_NUMEL: Final = 1 << 20
"""Squares are summed in pieces of so many elements, counted from the start of a region.

So the bits depend on the region alone, and the scratch memory does not grow with it.
"""

CONVERTED_CHUNK_NUMEL: Final = 1 << 18
"""What is added in another dtype is converted in pieces of so many elements."""

SCALAR_BYTES: Final = 32
"""No op that decides over scalars has more of them at once than this."""

SMALL_NUMEL: Final = 1024
"""Up to so many elements every rank adds them all, which costs less than two exchanges; the bits are the same."""


def scratch_bytes(program: Program, op: Op, *, kernels: str = EAGER) -> int:
    """The most bytes that an op holds at once beside its buffers, on any rank.

    For ops over scalars the figure is a bound, ``SCALAR_BYTES``; for ``compute`` what its segment declares for these
    kernels, 0 where it declares nothing.
    """
    match op:
        case ops.Compute():
            return dict(program.segment_by_name[op.segment].workspace_bytes).get(kernels, 0)
        case ops.GradNorm():
            return max((_squares_bytes(program, source) for source in op.sources), default=0) + 4
        case ops.CheckFinite():
            return sum(_extremes_bytes(program, source) for source in op.sources) + SCALAR_BYTES
        case ops.Decide() | ops.UpdateScale():
            return SCALAR_BYTES
        case ops.Cast() if op.mode is Mode.ACCUMULATE:
            own, wanted = _dtype(program, op.source), _dtype(program, op.destination)
            numel = min(op.destination.local_numel(program.mesh), CONVERTED_CHUNK_NUMEL)
            return 0 if own is wanted else numel * wanted.itemsize_bytes
        case ops.Collective():
            return _exchanged_bytes(program, op)
        case ops.Memory() | ops.Wait() | ops.Elementwise() | ops.OptimizerStep() | ops.Transfer():
            return 0
        case _:
            assert_never(op)


def device_bytes(program: Program, op: Op, *, kernels: str = EAGER) -> int:
    """The same without collectives, which NCCL carries out in memory of its own."""
    return 0 if isinstance(op, ops.Collective) else scratch_bytes(program, op, kernels=kernels)


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


# ------------------------------------------------------------------------------------------------------ collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One pair: elements here and there, their dtypes and that of the message."""

    source_numel: int
    numel: int
    source: DType
    wire: DType
    destination: DType

    @property
    def message_bytes(self) -> int:
        """The source converted to what travels; none where it is that already."""
        return 0 if self.source is self.wire else self.source_numel * self.wire.itemsize_bytes


def _exchanged_bytes(program: Program, op: ops.CollectiveOp) -> int:
    pieces = list(_pieces(program, op))
    messages = sum(piece.message_bytes for piece in pieces)
    size = program.mesh.size(program.comm_by_name[op.comm].axis)
    if size == 1:
        return max((piece.message_bytes for piece in pieces), default=0)
    match op:
        case ops.Gather():
            return messages + sum(_arriving_bytes(piece) for piece in pieces)
        case ops.ReduceScatter():
            return messages + _reduced_bytes(program, op, pieces, size, whole=False)
        case ops.AllReduce():
            is_small = sum(piece.source_numel for piece in pieces) <= SMALL_NUMEL
            return messages + _reduced_bytes(program, op, pieces, size, whole=is_small)
        case ops.Broadcast():
            return max(
                piece.message_bytes + piece.source_numel * piece.wire.itemsize_bytes
                for piece in pieces
            )
        case _:
            assert_never(op)


def _pieces(program: Program, op: ops.CollectiveOp) -> Iterator[_Piece]:
    for pair in op.pairs:
        source = _dtype(program, pair.source)
        yield _Piece(
            source_numel=pair.source.local_numel(program.mesh),
            numel=pair.destination.local_numel(program.mesh),
            source=source,
            wire=source if op.wire_dtype is None else op.wire_dtype,
            destination=_dtype(program, pair.destination),
        )


def _arriving_bytes(piece: _Piece) -> int:
    """Messages that cannot be received where they belong."""
    return 0 if piece.wire is piece.destination else piece.numel * piece.wire.itemsize_bytes


def _reduced_bytes(
    program: Program,
    op: ops.ReduceScatter | ops.AllReduce,
    pieces: list[_Piece],
    size: int,
    *,
    whole: bool,
) -> int:
    """What arrives from every rank, as far as the op has no staging for it, and what adding it up takes."""
    staging = None if whole or op.staging is None else op.staging
    left = 0 if staging is None else staging.local_numel(program.mesh)
    arriving = most = 0
    for piece in pieces:
        own = piece.source_numel if whole else -(-piece.source_numel // size)
        numel = size * own
        is_staged = staging is not None and numel <= left and _dtype(program, staging) is piece.wire
        left -= numel if is_staged else 0
        arriving += 0 if is_staged else numel * piece.wire.itemsize_bytes
        most = max(most, own * _combined_bytes(piece, size))
    return arriving + most


def _combined_bytes(piece: _Piece, size: int) -> int:
    """Bytes an element that ``comm.base.combine`` takes for as many contributions."""
    wide = DType.F32 if piece.destination.is_low_precision else piece.destination
    if size == 2 and piece.wire is piece.destination:
        return 0
    converted = 0 if piece.wire is wide else wide.itemsize_bytes
    common = promoted(wide, piece.wire)
    part = 0 if piece.wire is common else common.itemsize_bytes
    total = 0 if size == 2 and wide is piece.destination else wide.itemsize_bytes
    return converted + total + part
