"""The decision of an update in the abstract interpreter: the ops that take it, scale the loss by it, and follow it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import Micro, NamedContent
from zeroir.ir.reports import Quantity
from zeroir.verify.context import spell, title
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import (
    POISON,
    Decision,
    Elements,
    NamedKey,
    Poison,
    Statistic,
    Value,
    Weight,
)
from zeroir.verify.interpreter.gradients import weight_problem
from zeroir.verify.interpreter.section_run import SectionRun
from zeroir.verify.interpreter.statistics import NORM, OVERFLOW, statistic_problem

ChangeOp = ops.StepOp | ops.Average
"""The ops that change parameters, their states or their averages, unless the decision is to skip."""

NORM_ORDER: Final = "order of the norm"
"""The key, among the settings, of the order in which a norm adds gradients."""


def decide(run: SectionRun, op: ops.Decide) -> None:
    """Check what the decision reads, and write its results."""
    _check_reported(run, op)
    _check_divisor(run, op)
    _check_loss_scale(run, op)
    for region, kind in ((op.overflow, OVERFLOW), (op.norm, NORM)):
        if region is None:
            continue
        problem = statistic_problem(run, region, kind)
        if problem is not None:
            run.fail("Z405", f"decide rests on a wrong statistic: {problem}", region.buffer)
    setting = (
        "decide",
        op.overflow is not None,
        op.skip is not None,
        op.max_norm,
        tuple(held_value(run, count) for count in (op.step, *op.counts)),
        None if op.loss_scale is None else held_value(run, op.loss_scale),
        *(() if op.weight is None else ("weight",)),
    )
    run.settings.setdefault(setting, run.line)
    if op.norm is not None:
        run.settings.setdefault((NORM_ORDER, _order(run, op.norm)), run.line)
        run.reported[Quantity.SQUARED_NORM] = list(run.memory.read(op.norm))
    if op.weight is not None:
        run.reported[Quantity.SUMMED_WEIGHT] = list(run.memory.read(op.weight))
    number = run.numbering.of(("decision", run.section.name, run.line))
    run.decided[number] = op.skip is not None
    run.memory.write(op.gradient_divisor, [(0, 1, Decision("divisor", number))])
    _compare_with_guess(run, op, number)
    if op.skip is not None:
        run.reported[Quantity.SKIP] = [(0, 1, Decision("skip", number))]
        run.memory.write(op.skip, run.reported[Quantity.SKIP])
    for count in (op.step, *op.counts):
        _check_counter(run, op, count, Quantity.STEP)
        _advance(run, count)


def guess(run: SectionRun, op: ops.Guess) -> None:
    """Check that the guess is the decision of a step that is neither clipped nor skipped, and write its results."""
    _check_divisor(run, op)
    _check_loss_scale(run, op)
    _check_counter(run, op, op.step, Quantity.STEP)
    number = run.numbering.of(("guess", run.section.name, run.line))
    run.memory.write(op.gradient_divisor, [(0, 1, Decision("guessed divisor", number))])
    run.memory.write(op.next_step, [(0, 1, Decision("next step", number))])


def _compare_with_guess(run: SectionRun, op: ops.Decide, number: int) -> None:
    """Check that the decision says whether a guess was right."""
    if op.guess is None or op.redo is None:
        return
    guessed = decision_number(run, op.guess, "guessed divisor")
    if guessed is None:
        where = spell(op.guess, run.program)
        run.fail("Z405", f"decide compares itself with {where}, which is no guess", op.guess.buffer)
        return
    run.guesses[number] = guessed
    run.reported[Quantity.REDO] = [(0, 1, Decision("redo", number))]
    run.memory.write(op.redo, run.reported[Quantity.REDO])


def _check_loss_scale(run: SectionRun, op: ops.Decide | ops.Guess) -> None:
    """Check that gradients are divided by the loss scale that the backward used."""
    if op.loss_scale is not None:
        _check_counter(run, op, op.loss_scale, Quantity.LOSS_SCALE)
    elif any(isinstance(other, ops.UpdateScale) for other in run.program.ops()):
        run.fail("Z405", f"{title(op)} ignores the loss scale that update_scale maintains")


_REPORTED_OPERANDS: Final[Mapping[Quantity, str]] = {
    Quantity.STEP: "step",
    Quantity.LOSS_SCALE: "loss_scale",
    Quantity.SQUARED_NORM: "norm",
    Quantity.SKIP: "skip",
    Quantity.REDO: "redo",
}


def _check_reported(run: SectionRun, op: ops.Decide) -> None:
    """Check that the header names the buffers that a decision reads and writes, because the engine reports them."""
    for quantity, name in _REPORTED_OPERANDS.items():
        region: Region | None = getattr(op, name)
        if region is not None and quantity not in run.program.report_of:
            where = spell(region, run.program)
            run.fail(
                "Z408",
                f"decide has {name}={where}, but no report names the {quantity}, which the engine reads",
                region.buffer,
                advice=f"Say in the header: report {quantity} %{region.buffer}.",
            )


def _check_counter(
    run: SectionRun,
    op: ops.Decide | ops.Guess | ops.UpdateScale,
    region: Region,
    quantity: Quantity,
) -> None:
    """Check that a decision reads the step count and the loss scale from the start of the step."""
    if quantity in run.program.report_of and not is_counter(run, region, quantity, 0):
        (_, _, value), *_ = run.memory.read(region)
        run.fail(
            "Z405",
            f"{title(op)} reads {spell(region, run.program)}, which is not the {quantity} that the step began with: it "
            f"holds {describe(value)}",
            region.buffer,
        )


def is_counter(run: SectionRun, region: Region, quantity: Quantity, version: int) -> bool:
    """Return whether a region has the value at rest in the buffer of a report, advanced ``version`` times.

    For the step count it may be that of another count of steps that the decision advances.
    """
    report = run.program.report_of.get(quantity)
    names = [] if report is None else [report.buffer]
    names += run.shared.more_counts if quantity is Quantity.STEP else ()
    contents = [run.program.buffer_by_name[name].holds for name in names]
    expected = [
        Elements(NamedKey(content.name, version))
        for content in contents
        if isinstance(content, NamedContent)
    ]
    return bool(expected) and all(
        value in (*expected, POISON) for _, _, value in run.memory.read(region)
    )


def _check_divisor(run: SectionRun, op: ops.Decide | ops.Guess) -> None:
    """Check the divisor: the number of terms of a gradient (ranks times micro-steps), or the sum of their weights."""
    if op.weight is not None:
        _check_weight(run, op, op.weight)
    elif run.program.weight is not None:
        run.fail("Z402", f"{title(op)} ignores the weights of the micro-batches")
    else:
        _check_fixed_divisor(run, op)


def _check_weight(run: SectionRun, op: ops.Decide | ops.Guess, region: Region) -> None:
    """Check that the divisor is the weight of all micro-steps, summed over some axes, times the sizes of the others."""
    ((_, _, value),) = run.memory.read(region)
    first = value.terms[0].summed if isinstance(value, Weight) and value.terms else ()
    axes = run.layout.axes
    summed = tuple(axis for axis in axes if axis in first)
    problem = weight_problem(run, value, Micro.ALL, summed)
    where = spell(region, run.program)
    if problem is not None:
        run.fail("Z402", f"{title(op)} divides by {where}: {problem.sentence}", region.buffer)
        return
    missing = [axis for axis in axes if axis not in summed]
    if run.program.weight is not None and missing:
        what = f"{title(op)} divides by {where}, this rank's weights: they are not summed over {missing[0]}"
        run.fail("Z402", what, region.buffer)
        return
    divisor = math.prod(run.layout.sizes[axis] for axis in missing)
    if op.divisor != divisor:
        over = " and ".join(summed) or "no axis"
        run.fail(
            "Z402",
            f"{title(op)} divides by {op.divisor} × {where}, whose weight is summed over {over}, instead of {divisor} "
            "× it",
            region.buffer,
            advice=f"Say divisor={divisor}: gradients are sums over ranks and micro-steps.",
        )


def _check_fixed_divisor(run: SectionRun, op: ops.Decide | ops.Guess) -> None:
    """Check that a divisor without weights is the number of micro-batches of all ranks, in a step with one section."""
    if run.layout.has_past:
        run.fail(
            "Z402",
            f"{title(op)} divides gradients by {op.divisor}, but a step has any number of micro-steps",
            advice="Give it the sum of the weights of the micro-steps, weight=…, each of which may be 1.",
        )
        return
    count = run.program.mesh.world_size * run.program.interleaved
    if op.divisor != count:
        run.fail(
            "Z402",
            f"{title(op)} divides gradients by {op.divisor} instead of {count}, the micro-batches of all ranks",
            advice=f"Say divisor={count}: gradients are sums over ranks and micro-steps.",
        )


def _order(run: SectionRun, norm: Region) -> Hashable:
    """Return the order in which a norm adds gradients, which determines its rounding."""
    return tuple(
        value.order if isinstance(value, Statistic) else None
        for _, _, value in run.memory.read(norm)
    )


def update_scale(run: SectionRun, op: ops.UpdateScale) -> None:
    """Check that the loss scale follows this step's decision, once."""
    if decision_number(run, op.skip, "skip") is None:
        run.fail("Z405", "update_scale does not follow this step's skip decision", op.skip.buffer)
    _check_counter(run, op, op.state, Quantity.LOSS_SCALE)
    if op.weight is not None:
        ((_, _, value),) = run.memory.read(op.weight)
        problem = weight_problem(run, value, Micro.ALL, run.layout.axes)
        if problem is not None:
            run.fail(
                "Z405", f"update_scale reads a wrong weight: {problem.sentence}", op.weight.buffer
            )
    setting = (
        "scale",
        held_value(run, op.state),
        op.window,
        op.factor,
        op.hysteresis,
        op.minimum,
        op.refill,
        op.weight is not None,
    )
    run.settings.setdefault(setting, run.line)
    _advance(run, op.state)


def check_skip(run: SectionRun, op: ChangeOp, skip: Region | None, decision: int | None) -> None:
    """Check that an op of the update follows the decision to skip with this number, if one was taken."""
    name = ops.op_name(type(op))
    if skip is None:
        if decision is not None:
            run.fail("Z405", f"{name} ignores the decision to skip", changed_region(op).buffer)
    elif decision is None or decision_number(run, skip, "skip") != decision:
        run.fail(
            "Z405",
            f"{name} reads {spell(skip, run.program)}, which is not this step's decision",
            skip.buffer,
        )


def decision_number(run: SectionRun, region: Region, what: str) -> int | None:
    """Return the number of the decision in a scalar."""
    ((_, _, value),) = run.memory.read(region)
    return value.number if isinstance(value, Decision) and value.what == what else None


def held_value(run: SectionRun, region: Region) -> Hashable:
    """Return the value of a scalar, without its buffer."""
    return tuple(run.memory.read(region))


def is_version(run: SectionRun, region: Region, version: int) -> bool:
    """Return whether a scalar has its first value of the step, changed in place ``version`` times."""
    for _, _, value in run.memory.read(region):
        if isinstance(value, Poison):
            continue
        if not (isinstance(value, Elements) and isinstance(value.key, NamedKey)):
            return False
        if value.key.version != version or value.summed or value.strides:
            return False
    return True


def _advance(run: SectionRun, region: Region) -> None:
    """Count an in-place change of a scalar."""
    changed: list[tuple[int, int, Value]] = []
    for a, b, value in run.memory.read(region):
        new: Value = POISON
        if isinstance(value, Elements) and isinstance(value.key, NamedKey):
            new = Elements(NamedKey(value.key.name, value.key.version + 1), value.shift)
        changed.append((a, b, new))
    run.memory.write(region, changed)


def changed_region(op: ChangeOp) -> Region:
    """Return the region to report for an op."""
    return op.direction if isinstance(op, ops.Direction) else op.param
