"""The operands of an optimizer that works on whole parameters: what its step reads beside its own slice (Z403)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import DIRECTION, FACTORS
from zeroir.ir.factors import factors_numel
from zeroir.ir.ops import Algorithm
from zeroir.verify import algebra
from zeroir.verify.context import spell
from zeroir.verify.descriptions import describe
from zeroir.verify.domain import POISON, Cover, Elements, FlatKey, PieceList, Value

if TYPE_CHECKING:
    from zeroir.verify.interpreter import SectionRun


def check_operands(
    run: SectionRun, op: ops.OptimizerStep, directions: PieceList, key: FlatKey, updated: Cover
) -> None:
    """Every rank must have the directions of the whole flat, and what else the algorithm reads of whole parameters.

    ``key`` is that of the elements ``updated``, which the op steps.
    """
    flat = run.program.flat_by_name[key.flat]
    numel = flat.padded_numel
    _check(run, op, op.grad, directions, FlatKey(DIRECTION, key.flat, 1), numel)
    if op.whole is not None:
        pieces = run.take(op.whole, "Z403")
        _check(run, op, op.whole, pieces, FlatKey(key.quantity, key.flat, 0), numel)
    if op.factors is not None:
        pieces = run.take(op.factors, "Z403")
        wanted = FlatKey(FACTORS, key.flat, 0)
        _check(run, op, op.factors, pieces, wanted, factors_numel(flat))
        is_all = updated == Cover(key.flat, 0, (), numel)
        if op.whole is None and not is_all:
            run.fail(
                "Z403",
                f"optimizer_step updates {spell(op.param, run.program)}, a part of flat {key.flat}, but {op.algorithm} "
                "reads whole parameters",
                op.param.buffer,
                advice="Gather the parameters before the step, and give it these: whole=…",
            )
    if op.algorithm is Algorithm.MUON:
        wrong = next((slot for slot in flat.slots if len(slot.shape) != 2), None)
        if wrong is not None:
            run.fail(
                "Z403",
                f"optimizer_step updates {wrong.name} of shape {list(wrong.shape)} by muon, which takes matrices alone",
                op.param.buffer,
                advice="Let another optimizer update it, in a flat of its own.",
            )


def _check(
    run: SectionRun,
    op: ops.OptimizerStep,
    region: Region,
    pieces: PieceList,
    key: FlatKey,
    numel: int,
) -> None:
    """The region must hold this quantity of the whole flat, on every rank."""
    expected: Value = Elements(key)
    if pieces == [(0, numel, expected)]:
        return
    if any(algebra.is_poisoned(value) for _, _, value in pieces):
        return
    wrong = next((value for _, _, value in pieces if value != expected), None)
    held = "only a part of it" if wrong is None else describe(wrong)
    run.fail(
        "Z403",
        f"optimizer_step of {spell(op.param, run.program)} needs {key.quantity} of the whole flat {key.flat} in "
        f"{spell(region, run.program)}, which holds {held}",
        op.param.buffer,
        region.buffer,
        advice=f"Give it {describe(expected)} of every rank.",
    )


def advance_factors(run: SectionRun, region: Region) -> None:
    """Move factors to the next version."""
    moved: list[tuple[int, int, Value]] = []
    for a, b, value in run.memory.read(region):
        new: Value = POISON
        if isinstance(value, Elements) and isinstance(value.key, FlatKey):
            key = FlatKey(value.key.quantity, value.key.flat, value.key.version + 1)
            new = Elements(key, value.shift, value.strides)
        moved.append((a, b, new))
    run.memory.write(region, moved)
