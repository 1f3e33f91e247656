"""The operands of optimizers that work on whole parameters: what a step reads outside its own slice (Z403)."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import DIRECTION
from zeroir.ir.optimizers.declaration import OwnState
from zeroir.ir.own_coordinates import own_numel
from zeroir.verify.context import spell
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import POISON, Cover, Elements, FlatKey, PieceList, Value
from zeroir.verify.interpreter.section_run import SectionRun


def check_operands(
    run: SectionRun, op: ops.OptimizerStep, directions: PieceList, key: FlatKey, updated: Cover
) -> None:
    """Check that every rank has the directions of the whole flat, and the other whole values that the algorithm reads.

    ``key`` is that of the elements ``updated``, which the op steps.
    """
    flat = run.program.flat_by_name[key.flat]
    numel = flat.padded_numel
    _check(run, op, op.grad, directions, FlatKey(DIRECTION, key.flat, 1), numel)
    whole = op.algorithm.declaration.whole
    if whole is None:
        return
    if whole.reads_parameters:
        _check_parameters(run, op, key, updated)
    if whole.own_state is not None and op.factors is not None:
        check = _check_sharded if whole.own_state.is_sharded else _check_kept_whole
        check(run, op, op.factors, whole.own_state, key)
    if whole.takes_matrices_alone:
        wrong = next((slot for slot in flat.slots if len(slot.shape) != 2), None)
        if wrong is not None:
            run.fail(
                "Z403",
                f"optimizer_step updates {wrong.name} of shape {list(wrong.shape)} by {op.algorithm}, which "
                "takes matrices alone",
                op.param.buffer,
                advice="Let another optimizer update it, in a flat of its own.",
            )


def _check_parameters(run: SectionRun, op: ops.OptimizerStep, key: FlatKey, updated: Cover) -> None:
    """Check that every rank has the parameters of the whole flat."""
    flat = run.program.flat_by_name[key.flat]
    if op.whole is not None:
        pieces = run.take(op.whole, "Z403")
        wanted = FlatKey(key.quantity, key.flat, 0)
        _check(run, op, op.whole, pieces, wanted, flat.padded_numel)
    elif updated != Cover(key.flat, 0, (), flat.padded_numel):
        run.fail(
            "Z403",
            f"optimizer_step updates {spell(op.param, run.program)}, a part of flat {key.flat}, but {op.algorithm} "
            "reads whole parameters",
            op.param.buffer,
            advice="Gather the parameters before the step, and give it these: whole=…",
        )


def _check_kept_whole(
    run: SectionRun, op: ops.OptimizerStep, region: Region, state: OwnState, key: FlatKey
) -> None:
    """Check that every rank keeps all elements of the state."""
    flat = run.program.flat_by_name[key.flat]
    wanted = FlatKey(state.quantity, key.flat, 0)
    _check(run, op, region, run.take(region, "Z403"), wanted, own_numel(state.quantity, flat))


def _check_sharded(
    run: SectionRun, op: ops.OptimizerStep, region: Region, state: OwnState, key: FlatKey
) -> None:
    """Check that every rank has all elements of the state, and updates its slice of them at their place at rest."""
    flat = run.program.flat_by_name[key.flat]
    wanted = FlatKey(state.quantity, key.flat, 0)
    pieces = run.take(region, "Z403")
    gathered, held = region, pieces
    if op.whole is not None:
        gathered, held = op.whole, run.take(op.whole, "Z403")
    numel = run.memory.numel(gathered)
    _check(run, op, gathered, held, wanted, numel)
    is_all = numel >= own_numel(state.quantity, flat)
    resting = run.program.at_rest(region)
    holds = None if resting is None else run.program.buffer_by_name[resting.buffer].holds
    own = None if holds is None else run.layout.pieces(holds, run.memory.numel(region))
    is_at_rest = own is not None and own == pieces and resting is not None and resting.offset == 0
    is_own = all(isinstance(v, Elements) and v.key == wanted for _, _, v in pieces)
    if any(algebra.is_poisoned(value) for _, _, value in pieces) or (
        is_all and is_own and is_at_rest
    ):
        return
    run.fail(
        "Z403",
        f"optimizer_step moves {spell(region, run.program)}, which are not this rank's {state.quantity} of flat "
        f"{key.flat}, or reads only a part of them",
        region.buffer,
    )


def _check(
    run: SectionRun,
    op: ops.OptimizerStep,
    region: Region,
    pieces: PieceList,
    key: FlatKey,
    numel: int,
) -> None:
    """Check that the region has this quantity of the whole flat, on every rank."""
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


def advance(run: SectionRun, region: Region) -> None:
    """Advance the elements of a region, which has its own coordinates, to the next version."""
    moved: list[tuple[int, int, Value]] = []
    for a, b, value in run.memory.read(region):
        new: Value = POISON
        if isinstance(value, Elements) and isinstance(value.key, FlatKey):
            key = FlatKey(value.key.quantity, value.key.flat, value.key.version + 1)
            new = Elements(key, value.shift, value.strides)
        moved.append((a, b, new))
    run.memory.write(region, moved)
