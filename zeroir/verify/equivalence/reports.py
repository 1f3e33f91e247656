"""Checks that reports are correct: each reported value is in its buffer at the exit of the section before it is read.

The logical program defines the losses of a micro-batch, of a step and of an evaluation, which Z406 compares. All other
reported values follow from values of the same program, and are compared with them here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, assert_never

from zeroir.ir.buffers import Buffer, Role, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program
from zeroir.ir.reports import Quantity
from zeroir.verify.interpreter.descriptions import CAUSES, describe
from zeroir.verify.interpreter.domain import Elements, NamedKey, Poison, Undefined, Value, Zero
from zeroir.verify.interpreter.section_run import SectionRun

_ADVICE: Final[Mapping[Quantity, str]] = {
    Quantity.LOSS: "Keep this rank's loss, a mean over each batch, until the update.",
    Quantity.SUMMED_LOSS: "Let the update sum the loss over every axis once, and nothing change the sum.",
}


def report_problems(program: Program) -> Iterator[tuple[str, str]]:
    """Yield codes and messages for invalid declarations of reports."""
    for quantity, count in Counter(report.quantity for report in program.reports).items():
        if count > 1:
            yield "Z002", f"{quantity} is reported twice"
    for report in program.reports:
        buffer = program.buffer_by_name.get(report.buffer)
        if buffer is None:
            continue
        numel = _numel(program, report.quantity)
        if (buffer.role, buffer.dtype, buffer.numel) != (Role.SCALAR, DType.F32, numel):
            kind = f"{buffer.role} {buffer.dtype}[{buffer.numel}]"
            yield (
                "Z008",
                f"{report.quantity} is reported from a scalar f32[{numel}], and %{buffer.name} is {kind}",
            )


def _numel(program: Program, quantity: Quantity) -> int:
    match quantity:
        case Quantity.BATCH_LOSS:
            return program.interleaved
        case Quantity.LOSS_SCALE:
            return 3
        case _:
            return 1


_READ_AFTER: Final[Mapping[str, tuple[Quantity, ...]]] = {
    MICRO_STEP: (Quantity.LOSS, Quantity.BATCH_LOSS),
    LAST_MICRO_STEP: (Quantity.LOSS, Quantity.BATCH_LOSS),
    UPDATE: (
        Quantity.SUMMED_LOSS,
        Quantity.SUMMED_WEIGHT,
        Quantity.SQUARED_NORM,
        Quantity.SKIP,
        Quantity.REDO,
        Quantity.STEP,
        Quantity.LOSS_SCALE,
    ),
    EVALUATE: (Quantity.EVAL_LOSS,),
}


def check_reports(run: SectionRun) -> None:
    """Report each quantity whose buffer has another value when the engine reads it after this section."""
    for quantity in _READ_AFTER.get(run.section.name, ()):
        report = run.program.report_of.get(quantity)
        if report is None:
            if quantity is Quantity.SUMMED_WEIGHT and run.program.weight is not None:
                what = "the host gives weights to micro-batches, and no report names their sum"
                run.findings.add("Z408", what, section=run.section)
            continue
        buffer = run.program.buffer_by_name[report.buffer]
        for _, _, value in run.memory.read(whole(buffer)):
            problem = None if isinstance(value, Poison) else _problem(run, quantity, buffer, value)
            if problem is not None:
                what = f"is reported as {quantity}, but {problem}"
                run.fail_at_exit("Z408", whole(buffer), what, _ADVICE.get(quantity, ""))
                break


def _problem(run: SectionRun, quantity: Quantity, buffer: Buffer, value: Value) -> str | None:
    """Return why a value in the buffer of a report is not the quantity; None if it is."""
    if isinstance(value, Undefined):
        return f"has {CAUSES[value.cause]}"
    match quantity:
        case Quantity.LOSS | Quantity.BATCH_LOSS | Quantity.EVAL_LOSS:
            return _loss_problem(quantity, buffer, value)
        case Quantity.SUMMED_LOSS:
            return _summed_loss_problem(run, value)
        case Quantity.SUMMED_WEIGHT | Quantity.SQUARED_NORM | Quantity.SKIP | Quantity.REDO:
            decided = run.reported.get(quantity)
            if decided is None:
                return "the step takes no decision with it"
            is_it = value in [own for _, _, own in decided]
            return None if is_it else f"holds {describe(value)}, and not that of the decision"
        case Quantity.STEP | Quantity.LOSS_SCALE:
            return _counter_problem(run, buffer, value)
        case _:
            assert_never(quantity)


def _loss_problem(quantity: Quantity, buffer: Buffer, value: Value) -> str | None:
    """Check that a loss only includes this rank's micro-batches."""
    if not isinstance(value, Elements | Zero):
        return f"holds {describe(value)}"
    if isinstance(value, Zero):
        return None
    if value.summed:
        return "is summed over ranks, which only the update does"
    is_old = isinstance(buffer.holds, NamedContent) and value.key == NamedKey(buffer.holds.name, 0)
    if quantity is Quantity.EVAL_LOSS and is_old:
        return "still holds what it held before the evaluation"
    return None


def _summed_loss_problem(run: SectionRun, value: Value) -> str | None:
    """Check that the value is the loss at the start of the update, summed over every axis once, innermost first."""
    loss = run.program.buffer_by_name.get(run.program.loss or "")
    if loss is None or not isinstance(loss.holds, NamedContent):
        return "the program reports no loss of a rank that it could be a sum of"
    if not isinstance(value, Elements) or value.key != NamedKey(loss.holds.name, 0):
        return f"holds {describe(value)}, and not the loss of the step"
    axes, summed = run.layout.axes, value.summed
    if summed == axes:
        return None
    twice = next((axis for axis in summed if summed.count(axis) > 1), None)
    if twice is not None:
        return f"is summed over {twice} more than once"
    missing = [axis for axis in axes if axis not in summed]
    if missing:
        return f"is not summed over {missing[0]}"
    return f"is summed over {' and then '.join(summed)}, not innermost first"


def _counter_problem(run: SectionRun, buffer: Buffer, value: Value) -> str | None:
    """Check that the update advances a counter once, and does not change a fixed loss scale."""
    if not isinstance(buffer.holds, NamedContent):
        return None
    is_advanced = buffer.name in run.shared.counters
    if value == Elements(NamedKey(buffer.holds.name, int(is_advanced))):
        return None
    if value == Elements(NamedKey(buffer.holds.name, 0)):
        return "the update does not advance it"
    return f"was overwritten: it holds {describe(value)}"
