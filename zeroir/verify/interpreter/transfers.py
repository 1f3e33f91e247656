"""The effects of collectives on the abstract memory, which describes all ranks at once."""

from __future__ import annotations

from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.dtypes import DType
from zeroir.verify.context import spell, title
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.domain import (
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
from zeroir.verify.interpreter.section_run import SectionRun


def collective(run: SectionRun, op: ops.CollectiveOp) -> None:
    """Apply a collective: each destination gets the combination of the ranks' sources.

    A gather is an error if its content is already in the destination (Z102).
    """
    comm = run.program.comm_by_name[op.comm]
    size = comm.ranks or run.sizes[comm.axis]
    sources = _sources(run, op)
    results = sources
    if size > 1:
        results = [
            (pair, _result(run, op, comm.axis, size, pair, pieces)) for pair, pieces in sources
        ]
        if isinstance(op, ops.Gather) and all(_is_held(run, *result) for result in results):
            where = ", ".join(spell(pair.destination, run.program) for pair in op.pairs)
            run.fail(
                "Z102",
                f"{title(op)} fills {where}, which holds exactly that content already",
                *(pair.destination.buffer for pair in op.pairs),
            )
    for pair, pieces in results:
        run.memory.write(pair.destination, pieces)


def _is_held(run: SectionRun, pair: ops.Pair, result: PieceList) -> bool:
    return coalesced(run.memory.read(pair.destination)) == coalesced(result) and not any(
        algebra.is_poisoned(value) for _, _, value in result
    )


def _result(
    run: SectionRun, op: ops.CollectiveOp, axis: str, size: int, pair: ops.Pair, pieces: PieceList
) -> PieceList:
    """Return the value of a pair's destination, from the pieces of its source, along an axis of ``size`` ranks."""

    def seen(value: Value, rank: int) -> Value:
        return algebra.from_rank(value, axis, rank, run.numbering)

    match op:
        case ops.Gather():
            numel = run.memory.numel(pair.source)
            is_alike = all(seen(v, 0) == v for _, _, v in pieces)
            return spread(pieces, axis, size, numel, numel, None if is_alike else seen)
        case ops.Broadcast():
            return [(a, b, seen(at_coordinate(v, axis, op.root), op.root)) for a, b, v in pieces]
        case ops.ReduceScatter() | ops.AllReduce():

            def fail(code: str, sentence: str) -> None:
                where = spell(pair.source, run.program)
                run.fail(code, f"{sentence} ({where})", pair.source.buffer)

            run.note_reduction(pair.destination, pieces)
            how = algebra.Combination(axis, op.reduction, run.numbering, fail)
            combined = coalesced([(a, b, algebra.reduced(v, how)) for a, b, v in pieces])
            if isinstance(op, ops.AllReduce):
                return combined
            numel = run.memory.numel(pair.destination)
            own = Slice(tuple(opened(combined)), 0, ((axis, numel),))
            return unpack(simplify(own, numel, {**run.sizes, axis: size}), numel)
        case _:
            assert_never(op)


def _sources(run: SectionRun, op: ops.CollectiveOp) -> list[tuple[ops.Pair, PieceList]]:
    """Return the pieces that each pair sends."""
    is_sum = isinstance(op, ops.ReduceScatter | ops.AllReduce)
    taken = [(pair, run.take(pair.source, "Z402" if is_sum else "Z103")) for pair in op.pairs]
    if op.wire_dtype is not None:
        wire = op.wire_dtype
        taken = [(p, _on_wire(run, p, pieces, wire, is_sum=is_sum)) for p, pieces in taken]
    if op.staging is not None:
        run.memory.write(op.staging, [(0, run.memory.numel(op.staging), SCRATCH)])
    return taken


def _on_wire(
    run: SectionRun, pair: ops.Pair, pieces: PieceList, wire: DType, *, is_sum: bool
) -> PieceList:
    dtype = run.program.buffer_by_name[pair.source.buffer].dtype
    # Sums are FP32; values sent in F64 are added in F64, which rounds differently.
    is_finer_sum = is_sum and wire is DType.F64 and dtype is not DType.F64
    if algebra.represents(wire, dtype) and not is_finer_sum:
        return pieces
    run.note_rounding(pieces, wire)
    return [(a, b, algebra.on_wire(v, wire, run.numbering)) for a, b, v in pieces]
