"""Speculative steps in the abstract interpreter: their guesses, the values they keep, and their commits (Z405)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import MASTER, PARAM
from zeroir.verify.context import spell
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.decisions import decision_number, held_value
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import POISON, Cover, Elements, FlatKey, Value
from zeroir.verify.interpreter.section_run import SectionRun, Stepped
from zeroir.verify.interpreter.step_operands import (
    apply_settings,
    check_gradient,
    check_places,
    check_scalars,
    check_settings,
    check_state,
    resting_elements,
    settings_of,
    step_name,
    trained_elements,
)

_Speculation = ops.SpeculativeStep | ops.CommitStep


class _Change(NamedTuple):
    """The version of parameters and states before and after an op, each with its guess, None if it is final."""

    before: tuple[int, int | None]
    after: tuple[int, int | None]


def speculative_step(run: SectionRun, op: ops.SpeculativeStep) -> None:
    """Advance each element and its states to a guessed next version, with its final gradient, and keep the old ones."""
    number = decision_number(run, op.gradient_divisor, "guessed divisor")
    if number is None or decision_number(run, op.step, "next step") != number:
        run.fail(
            "Z405",
            f"speculative_step reads {spell(op.gradient_divisor, run.program)} and {spell(op.step, run.program)}, "
            "which are not a divisor and a step count of one guess",
            op.gradient_divisor.buffer,
            op.step.buffer,
        )
        _poison(run, (*_changed(op), *op.kept))
        return
    check_settings(run, op)
    old = [run.take(region, "Z403") for region in (op.param, *op.states)]
    # `commit_step` reports the settings of each element, which are compared with those of the logical program.
    _change(run, op, _Change((0, None), (1, _guess(run, op, number))), [])
    for region, pieces in zip(op.kept, old, strict=True):
        run.memory.write(region, pieces)


def commit_step(run: SectionRun, op: ops.CommitStep) -> None:
    """Make guessed elements final, by the decision that knows whether the guess was right."""
    check_scalars(run, op)
    number = decision_number(run, op.gradient_divisor, "divisor")
    if number is None:
        _poison(run, _changed(op))
        return
    guess = run.guesses.get(number)
    if guess is None or decision_number(run, op.redo, "redo") != number:
        run.fail(
            "Z405",
            f"commit_step reads {spell(op.redo, run.program)}, which does not say whether this step's guess was right",
            op.redo.buffer,
            advice="Give it the `redo` of the decision, which compares itself with the guess.",
        )
        _poison(run, _changed(op))
        return
    _change(run, op, _Change((1, _guess(run, op, guess)), (1, None)), run.steps)


def _changed(op: _Speculation) -> tuple[Region, ...]:
    return (op.param, *op.states, *(() if op.rounded is None else (op.rounded,)))


def _poison(run: SectionRun, regions: Iterable[Region]) -> None:
    """Write the results of an error that was already reported."""
    for region in regions:
        run.memory.write(region, [(0, run.memory.numel(region), POISON)])


def _guess(run: SectionRun, op: _Speculation, number: int) -> int:
    """Return the value number of everything that a step with that guess reads apart from its elements."""
    settings = (
        (s.group, held_value(run, s.lr), held_value(run, s.hyper))
        for s in sorted(op.settings, key=lambda s: s.group)
    )
    return run.numbering.of(("speculative step", op.algorithm, number, *settings))


def _change(run: SectionRun, op: _Speculation, change: _Change, steps: list[Stepped]) -> None:
    """Set each element and its states to another version, and add the settings used to ``steps``."""
    settings = settings_of(run, op)
    resting = resting_elements(run, op.param, is_needed=bool(op.others))
    gradient = run.take(op.grad, "Z402")
    regions = (op.param, *op.states)
    taken = [run.take(region, "Z403") for region in regions]
    kept = [run.take(r, "Z403") for r in op.kept] if isinstance(op, ops.CommitStep) else []
    is_commit = isinstance(op, ops.CommitStep)
    rounded = run.take(op.rounded, "Z403") if is_commit and op.rounded is not None else []
    written: list[list[tuple[int, int, Value]]] = [[] for _ in _changed(op)]
    for a, b, value in taken[0]:
        trained = trained_elements(value)
        if trained is None or (trained[1].version, trained[1].guess) != change.before:
            _refuse(run, op, value)
            for changed in written:
                changed.append((a, b, POISON))
            continue
        param, key = trained
        if not run.program.flat_by_name[key.flat].is_trainable:
            run.fail("Z403", f"{step_name(op)} updates the frozen flat {key.flat}", op.param.buffer)
        elements = Cover(key.flat, param.shift + a, param.strides, b - a)
        apply_settings(run, op, elements, settings, steps)
        if resting is not None:
            check_places(run, op, op.param, (a, b), param, key.flat, resting)
        quantities = (key.quantity, *op.algorithm.state_names)
        for name, region, pieces in zip(quantities[1:], op.states, taken[1:], strict=True):
            state = Elements(FlatKey(name, key.flat, *change.before), param.shift, param.strides)
            check_state(run, op, (name, region), pieces, (a, b), state)
        for name, region, pieces in zip(quantities, op.kept, kept, strict=False):
            old = Elements(FlatKey(name, key.flat, 0), param.shift, param.strides)
            check_state(run, op, (f"old {name}", region), pieces, (a, b), old)
        check_gradient(run, op, gradient, (a, b), param, key.flat)
        if op.rounded is not None:
            quantities = (*quantities, PARAM)
            _check_rounding(run, op, op.rounded, key)
            new = Elements(FlatKey(PARAM, key.flat, *change.before), param.shift, param.strides)
            check_state(run, op, (f"rounded {PARAM}", op.rounded), rounded, (a, b), new)
        for name, changed in zip(quantities, written, strict=True):
            after = FlatKey(name, key.flat, *change.after)
            changed.append((a, b, Elements(after, param.shift, param.strides)))
    for region, pieces in zip(_changed(op), written, strict=True):
        run.memory.write(region, pieces)


def _check_rounding(run: SectionRun, op: _Speculation, rounded: Region, key: FlatKey) -> None:
    """Check that only master weights are rounded, and to the dtype of their flat."""
    flat = run.program.flat_by_name[key.flat]
    if key.quantity != MASTER or run.program.buffer_by_name[rounded.buffer].dtype is not flat.dtype:
        run.fail(
            "Z403",
            f"{step_name(op)} rounds {key.quantity} of flat {flat.name} to {spell(rounded, run.program)}, but "
            f"parameters of this flat are master weights rounded to {flat.dtype}",
            rounded.buffer,
        )


def _refuse(run: SectionRun, op: _Speculation, value: Value) -> None:
    """Report elements that the op cannot change, unless they are the result of an earlier error."""
    if algebra.is_poisoned(value):
        return
    is_commit = isinstance(op, ops.CommitStep)
    run.fail(
        "Z405" if is_commit else "Z403",
        f"{step_name(op)} updates {spell(op.param, run.program)}, which holds {describe(value)}",
        op.param.buffer,
        advice="Give it the results of a speculative step with the same settings, and with the guess that the decision "
        "compared itself with."
        if is_commit
        else "Give it parameters or master weights that this step has not updated.",
    )
