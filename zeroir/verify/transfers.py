"""What collectives do to the abstract memory, which describes all ranks at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.verify import algebra
from zeroir.verify.context import spell, title
from zeroir.verify.domain import (
    SCRATCH,
    PieceList,
    Slice,
    Value,
    at_coordinate,
    coalesced,
    opened,
    simplify,
    spread,
    unpack,
)

if TYPE_CHECKING:
    from zeroir.verify.interpreter import SectionRun


def gather(run: SectionRun, op: ops.AllGather | ops.Prefetch) -> None:
    """An all-gather or prefetch: the slices of all ranks in order; an error where they stand there already (Z102)."""
    axis = run.program.comm_by_name[op.comm].axis
    size = run.sizes[axis]
    is_double = size > 1
    results: list[tuple[Region, PieceList]] = []
    for pair, pieces in _sources(run, op, "Z103"):
        numel = run.memory.numel(pair.source)
        result = pieces
        if size > 1:

            def seen(value: Value, rank: int) -> Value:
                return algebra.from_rank(value, axis, rank, run.numbering)

            is_alike = all(seen(v, 0) == v for _, _, v in pieces)
            result = spread(pieces, axis, size, numel, numel, None if is_alike else seen)
        results.append((pair.destination, result))
        is_double = (
            is_double
            and coalesced(run.memory.read(pair.destination)) == coalesced(result)
            and not any(algebra.is_poisoned(v) for _, _, v in result)
        )
    if is_double and op.pairs:
        where = ", ".join(spell(pair.destination, run.program) for pair in op.pairs)
        run.fail(
            "Z102",
            f"{title(op)} fills {where}, which holds exactly that content already",
            *(pair.destination.buffer for pair in op.pairs),
        )
    for region, pieces in results:
        run.memory.write(region, pieces)


def reduce(run: SectionRun, op: ops.ReduceScatter | ops.AllReduce) -> None:
    """An all-reduce, or this rank's slice of one, of values of which each rank has a part (Z402)."""
    axis = run.program.comm_by_name[op.comm].axis
    size = run.sizes[axis]
    results: list[tuple[Region, PieceList]] = []
    for pair, taken in _sources(run, op, "Z402"):
        pieces = taken
        if size > 1:
            name = spell(pair.source, run.program)
            buffer = pair.source.buffer

            def fail(code: str, sentence: str, name: str = name, buffer: str = buffer) -> None:
                run.fail(code, f"{sentence} ({name})", buffer)

            how = algebra.Combination(axis, op.reduction, run.numbering, fail)
            pieces = coalesced([(a, b, algebra.reduced(v, how)) for a, b, v in taken])
            if isinstance(op, ops.ReduceScatter):
                numel = run.memory.numel(pair.destination)
                pieces = unpack(_slice(run, pieces, axis, numel), numel)
        results.append((pair.destination, pieces))
    for region, pieces in results:
        run.memory.write(region, pieces)


def _slice(run: SectionRun, pieces: PieceList, axis: str, numel: int) -> Value:
    """This rank's slice of pieces over ``[0, numel × size)``."""
    return simplify(Slice(tuple(opened(pieces)), 0, ((axis, numel),)), numel, run.sizes)


def broadcast(run: SectionRun, op: ops.Broadcast) -> None:
    """The root's values on every rank."""
    axis = run.program.comm_by_name[op.comm].axis
    for pair, pieces in _sources(run, op, "Z103"):
        result = pieces
        if run.sizes[axis] > 1:
            result = [
                (
                    a,
                    b,
                    algebra.from_rank(
                        at_coordinate(v, axis, op.root), axis, op.root, run.numbering
                    ),
                )
                for a, b, v in pieces
            ]
        run.memory.write(pair.destination, result)


def _sources(run: SectionRun, op: ops.CollectiveOp, code: str) -> list[tuple[ops.Pair, PieceList]]:
    taken = [(pair, run.take(pair.source, code)) for pair in op.pairs]
    if op.wire_dtype is not None:
        wire = op.wire_dtype
        is_sum = isinstance(op, ops.ReduceScatter | ops.AllReduce)
        taken = [(p, _on_wire(run, p, pieces, wire, is_sum=is_sum)) for p, pieces in taken]
    if op.staging is not None:
        run.memory.write(op.staging, [(0, run.memory.numel(op.staging), SCRATCH)])
    return taken


def _on_wire(
    run: SectionRun, pair: ops.Pair, pieces: PieceList, wire: DType, *, is_sum: bool
) -> PieceList:
    dtype = run.program.buffer_by_name[pair.source.buffer].dtype
    # Sums are FP32; values that travel in F64 are added in F64, which rounds in another way.
    is_finer_sum = is_sum and wire is DType.F64 and dtype is not DType.F64
    if algebra.represents(wire, dtype) and not is_finer_sum:
        return pieces
    run.note_rounding(pieces, wire)
    return [(a, b, algebra.on_wire(v, wire, run.numbering)) for a, b, v in pieces]
