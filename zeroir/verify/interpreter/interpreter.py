"""The abstract interpreter: one run over a section covers every rank, every interleaving and every value.

It assumes the section's entry state and applies each op to the abstract memory; ``exits`` then compares that memory
with the exit state. The ordering was proved before, so every interleaving gives the same values as program order.
"""

from __future__ import annotations

from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import GRAD
from zeroir.ir.ops import Mode, Op
from zeroir.verify.context import spell, title
from zeroir.verify.interpreter import (
    algebra,
    averages,
    decisions,
    optimizer_steps,
    pages,
    speculation,
    statistics,
    transfers,
)
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import (
    POISON,
    ZERO,
    Elements,
    Gradient,
    PieceList,
    Term,
    Value,
    aligned,
)
from zeroir.verify.interpreter.section_run import SectionRun
from zeroir.verify.interpreter.value_numbers import CallOperand


def interpret(run: SectionRun, start: int = 0, stop: int | None = None) -> None:
    """Apply every op of the section's body, or those of some lines, to the abstract memory."""
    for line, op in enumerate(run.section.body[start:stop], start):
        run.line = line
        _step(run, op)


def _step(run: SectionRun, op: Op) -> None:
    if run.shared.pages:
        pages.check_dropped(run, op)
    match op:
        case ops.Wait():
            pass
        case ops.Memory():
            run.memory.forget(op.buffer)
        case ops.Collective():
            transfers.collective(run, op)
        case ops.Compute():
            _compute(run, op)
        case ops.Cast():
            _cast(run, op)
        case ops.Fill():
            number = run.numbering.of(("fill", op.value))
            value: Value = ZERO if op.value == 0 else Elements(number)
            run.memory.write(op.destination, [(0, run.memory.numel(op.destination), value)])
        case ops.Scale():
            _scale(run, op)
        case ops.GradNorm() | ops.CheckFinite():
            statistics.statistic(run, op)
        case ops.Guess():
            decisions.guess(run, op)
        case ops.Decide():
            decisions.decide(run, op)
        case ops.Direction():
            optimizer_steps.direction(run, op)
        case ops.OptimizerStep():
            optimizer_steps.optimizer_step(run, op)
        case ops.SpeculativeStep():
            speculation.speculative_step(run, op)
        case ops.CommitStep():
            speculation.commit_step(run, op)
        case ops.Average():
            averages.average(run, op)
        case ops.UpdateScale():
            decisions.update_scale(run, op)
        case ops.Transfer():
            run.memory.write(op.destination, run.take(op.source))
        case _:
            assert_never(op)


def _compute(run: SectionRun, op: ops.Compute) -> None:
    operands: list[CallOperand] = []
    is_poisoned = False
    for argument in op.arguments:
        region = argument.view.region
        name = argument.parameter
        if name is not None:
            if not _is_parameter(run, name, region):
                is_poisoned = True
            slot = run.program.parameter_by_name[name][1]
            operands.append(CallOperand(("parameter", slot.name)))
            continue
        pieces = run.take(region)
        if len(pieces) == 1:
            value = pieces[0][2]
            if isinstance(value, Elements) and not value.strides:
                key = (value.key, value.summed) if value.summed else value.key
                operands.append(CallOperand(key, value.shift))
                continue
        if any(algebra.is_poisoned(value) for _, _, value in pieces):
            is_poisoned = True
        operands.append(CallOperand(tuple(pieces)))
    results = run.shared.segments.results(op.segment, tuple(operands))
    for destination, (number, key, shift) in zip(op.destinations, results, strict=True):
        if destination is None:
            continue
        if destination.gradient is not None:
            _contribute(run, op, destination, destination.gradient, number, is_poisoned)
            continue
        region = destination.view.region
        numel = run.memory.numel(region)
        result: Value = POISON if is_poisoned else Elements(key, shift)
        if destination.mode is Mode.WRITE:
            run.memory.write(region, [(0, numel, result)])
        else:
            run.memory.write(region, _added(run, run.take(region), [(0, numel, result)], region))


def _is_parameter(run: SectionRun, name: str, region: Region) -> bool:
    expected, numel = run.shared.parameters[name]
    pieces = run.memory.read(region)
    if not pieces or (len(pieces) == 1 and pieces[0][2] == expected and region.numel == numel):
        return True
    if any(algebra.is_poisoned(value) for _, _, value in pieces):
        return False
    wrong = next((value for _, _, value in pieces if value != expected), pieces[0][2])
    run.fail(
        "Z401",
        f"{title(run.section.body[run.line])} needs parameter {name} in "
        f"{spell(region, run.program)}, which holds {describe(wrong)}",
        region.buffer,
    )
    return False


def _contribute(
    run: SectionRun,
    op: ops.Compute,
    destination: ops.Destination,
    name: str,
    number: int,
    is_poisoned: bool,
) -> None:
    flat, slot = run.program.parameter_by_name[name]
    region = destination.view.region
    value: Value = Gradient(flat.name, (Term(number, (), 1),), slot.offset)
    if is_poisoned:
        value = POISON
    if slot.name in run.consumed:
        run.fail(
            "Z405",
            f"{title(op)} contributes to the gradient of {name} after a statistic or an "
            "update has read it",
            region.buffer,
        )
    call = (number, (op.arguments, name))
    added = run.contributions.setdefault(slot.name, [])
    run.lines.setdefault(number, run.line)
    if run.shared.may_repeat or call not in run.calls:
        run.calls.add(call)
        added.append(number)
    pieces: PieceList = [(0, region.numel, value)]
    if destination.mode is Mode.ACCUMULATE:
        pieces = _added(run, run.memory.read(region), pieces, region)
    run.note_held(region, pieces)
    run.memory.write(region, pieces)


def _added(run: SectionRun, left: PieceList, right: PieceList, region: Region) -> PieceList:
    def fail(code: str, sentence: str) -> None:
        run.fail(code, f"{sentence}, in {spell(region, run.program)}", region.buffer)

    def note(added: algebra.Sum) -> None:
        run.sums.setdefault(added, run.line)

    dtype = run.program.buffer_by_name[region.buffer].dtype
    how = algebra.Addition(dtype, run.numbering, fail, note)
    if len(left) != 1 or len(right) != 1:
        return [(a, b, algebra.add(x, y, how)) for a, b, x, y in aligned(left, right)]
    return [(left[0][0], left[0][1], algebra.add(left[0][2], right[0][2], how))]


def _cast(run: SectionRun, op: ops.Cast) -> None:
    buffers = run.program.buffer_by_name
    source, target = buffers[op.source.buffer].dtype, buffers[op.destination.buffer].dtype
    is_sum = op.mode is Mode.ACCUMULATE
    code = "Z402" if is_sum or _is_gradient(run, op.source) else "Z103"
    pieces = run.take(op.source, code)
    if not algebra.represents(target, source):
        run.note_rounding(pieces, target)
    if target is not source:
        pieces = [
            (a, b, algebra.cast(v, target, run.program.flat_by_name, run.numbering))
            for a, b, v in pieces
        ]
    if is_sum:
        pieces = _added(run, run.memory.read(op.destination), pieces, op.destination)
    run.note_held(op.destination, pieces)
    run.memory.write(op.destination, pieces)


def _is_gradient(run: SectionRun, region: Region) -> bool:
    holds = run.program.buffer_by_name[region.buffer].holds
    return getattr(holds, "quantity", None) == GRAD


def _scale(run: SectionRun, op: ops.Scale) -> None:
    by = run.numbering.of(("by", tuple(run.take(op.by))))
    run.memory.write(
        op.region,
        [(a, b, algebra.scaled(v, by, run.numbering)) for a, b, v in run.take(op.region)],
    )
