"""Optimizer steps in the abstract interpreter: their gradients, settings, states and parameters."""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir import ops
from zeroir.ir.contents import DIRECTION
from zeroir.verify.context import spell
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter import whole_parameter_steps as whole_steps
from zeroir.verify.interpreter.domain import (
    POISON,
    Cover,
    Elements,
    FlatKey,
    PieceList,
    Strides,
    Value,
)
from zeroir.verify.interpreter.gradients import is_zero, locate
from zeroir.verify.interpreter.section_run import SectionRun
from zeroir.verify.interpreter.step_operands import (
    apply_settings,
    check_gradient,
    check_places,
    check_scalars,
    check_state,
    resting_elements,
    settings_of,
    trained_elements,
)


def optimizer_step(run: SectionRun, op: ops.OptimizerStep) -> None:
    """Advance each element and its states to the next version, with its final gradient, after the decision."""
    check_scalars(run, op)
    settings = settings_of(run, op)
    is_whole = op.algorithm.direction_dtype is not None
    resting = resting_elements(run, op.param, is_needed=is_whole or bool(op.others))
    states = [run.take(region, "Z403") for region in op.states]
    scales = [run.take(region, "Z403") for region in op.scales]
    gradient = run.take(op.grad, "Z402")
    written: list[list[tuple[int, int, Value]]] = [[] for _ in (op.param, *op.states)]
    for a, b, value in run.take(op.param, "Z403"):
        trained = trained_elements(value)
        if trained is None:
            if not algebra.is_poisoned(value):
                where = spell(op.param, run.program)
                run.fail(
                    "Z403",
                    f"optimizer_step updates {where}, which holds no parameter or master weights",
                    op.param.buffer,
                )
            for updated in written:
                updated.append((a, b, POISON))
            continue
        param, key = trained
        if not run.program.flat_by_name[key.flat].is_trainable:
            run.fail("Z403", f"optimizer_step updates the frozen flat {key.flat}", op.param.buffer)
        elements = Cover(key.flat, param.shift + a, param.strides, b - a)
        apply_settings(run, op, elements, settings, run.steps)
        if resting is not None:
            check_places(run, op, op.param, (a, b), param, key.flat, resting)
        if key.version:
            run.fail(
                "Z403",
                f"optimizer_step updates {key.quantity} of flat {key.flat} a second time",
                op.param.buffer,
            )
        for name, region, pieces in zip(op.state_quantities, op.states, states, strict=True):
            expected = Elements(FlatKey(name, key.flat, key.version), param.shift, param.strides)
            check_state(run, op, (name, region), pieces, (a, b), expected)
        _check_scales(run, op, scales, (a, b), param, key)
        for quantity, updated in zip((key.quantity, *op.state_quantities), written, strict=True):
            new = FlatKey(quantity, key.flat, key.version + 1)
            updated.append((a, b, Elements(new, param.shift, param.strides)))
        if is_whole:
            whole_steps.check_operands(run, op, gradient, key, elements)
        else:
            check_gradient(run, op, gradient, (a, b), param, key.flat)
    for region in (*op.scales, *(() if op.factors is None else (op.factors,))):
        whole_steps.advance(run, region)
    run.memory.write(op.grad, [(a, b, algebra.spent(value)) for a, b, value in gradient])
    for region, updated in zip((op.param, *op.states), written, strict=True):
        run.memory.write(region, updated)


def direction(run: SectionRun, op: ops.Direction) -> None:
    """Advance the states of each element to the next version, with its final gradient, after the decision."""
    check_scalars(run, op)
    settings = settings_of(run, op)
    states = [run.take(region, "Z403") for region in op.states]
    gradient = run.take(op.grad, "Z402")
    numel = run.memory.numel(op.grad)
    place = next(filter(None, (locate(value) for _, _, value in gradient)), None)
    if place is None and all(is_zero(value) for _, _, value in gradient):
        place = _place_of(states)
    spent: PieceList = [(a, b, algebra.spent(value)) for a, b, value in gradient]
    run.memory.write(op.grad, spent)
    if place is None:
        if not any(algebra.is_poisoned(value) for _, _, value in gradient):
            where = spell(op.grad, run.program)
            run.fail("Z402", f"direction reads {where}, which holds no gradient", op.grad.buffer)
        for region in (op.direction, *op.states):
            run.memory.write(region, [(0, numel, POISON)])
        return
    flat, shift, strides = place
    moved = Elements(FlatKey(DIRECTION, flat, 1), shift, strides)
    check_gradient(run, op, gradient, (0, numel), moved, flat)
    apply_settings(run, op, Cover(flat, shift, strides, numel), settings, run.directions)
    resting = resting_elements(run, op.states[0], is_needed=bool(op.others)) if op.states else None
    if resting is not None:
        check_places(run, op, op.states[0], (0, numel), moved, flat, resting)
    for name, region, pieces in zip(op.algorithm.state_names, op.states, states, strict=True):
        expected = Elements(FlatKey(name, flat, 0), shift, strides)
        check_state(run, op, (name, region), pieces, (0, numel), expected)
        new = Elements(FlatKey(name, flat, 1), shift, strides)
        run.memory.write(region, [(0, numel, new)])
    run.memory.write(op.direction, [(0, numel, moved)])


def _place_of(states: Sequence[PieceList]) -> tuple[str, int, Strides] | None:
    """Return flat, shift and strides of the elements that these states belong to; None if they are only padding."""
    for pieces in states:
        for _, _, value in pieces:
            if isinstance(value, Elements) and isinstance(value.key, FlatKey):
                return value.key.flat, value.shift, value.strides
    return None


def _check_scales(
    run: SectionRun,
    op: ops.OptimizerStep,
    scales: Sequence[PieceList],
    interval: tuple[int, int],
    param: Elements,
    key: FlatKey,
) -> None:
    """Check that the scales are those of the blocks of these elements, at the same version."""
    block_numel = op.form.block_numel
    start, stop = (position // block_numel for position in interval)
    strides = tuple((axis, stride // block_numel) for axis, stride in param.strides)
    for name, region, pieces in zip(op.scale_quantities, op.scales, scales, strict=True):
        numbers = (*interval, param.shift, *(stride for _, stride in param.strides))
        if any(number % block_numel for number in numbers):
            run.fail(
                "Z403",
                f"optimizer_step updates {spell(op.param, run.program)}, a part of the {block_numel} elements that "
                f"share a scale in {spell(region, run.program)}",
                op.param.buffer,
                region.buffer,
            )
            return
        blocks = Elements(FlatKey(name, key.flat, key.version), param.shift // block_numel, strides)
        check_state(run, op, (name, region), pieces, (start, stop), blocks)
