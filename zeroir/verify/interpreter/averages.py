"""The moving averages of parameters in the abstract interpreter (Z403, Z405)."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.contents import EMA
from zeroir.verify.context import spell
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.decisions import check_skip
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import POISON, Cover, Elements, FlatKey, Value, cut
from zeroir.verify.interpreter.section_run import SectionRun
from zeroir.verify.interpreter.step_operands import stepped, trained_elements


def average(run: SectionRun, op: ops.Average) -> None:
    """Advance each average to the next version, with the parameter that this step has updated once."""
    decisions = [number for number, may_skip in run.decided.items() if may_skip]
    check_skip(run, op, op.skip, decisions[0] if decisions else None)
    averages = run.take(op.average, "Z403")
    written: list[tuple[int, int, Value]] = []
    for a, b, value in run.take(op.param, "Z403"):
        trained = trained_elements(value)
        if trained is None or (trained[1].version, trained[1].guess) != (1, None):
            if not algebra.is_poisoned(value):
                run.fail(
                    "Z403",
                    f"average reads {spell(op.param, run.program)}, which does not hold updated parameters: it holds "
                    f"{describe(value)}",
                    op.param.buffer,
                    op.average.buffer,
                    advice="Average parameters or master weights after their optimizer_step.",
                )
            written.append((a, b, POISON))
            continue
        updated, key = trained
        expected = Elements(FlatKey(EMA, key.flat, 0), updated.shift, updated.strides)
        for _, _, held in cut(averages, a, b):
            if held != expected and not algebra.is_poisoned(held):
                run.fail(
                    "Z403",
                    f"average adds {spell(op.param, run.program)} to {spell(op.average, run.program)}, which holds "
                    f"{describe(held)}",
                    op.param.buffer,
                    op.average.buffer,
                    advice=f"Give it {describe(expected)}.",
                )
        elements = Cover(key.flat, updated.shift + a, updated.strides, b - a)
        for start, stop, slot in run.layout.covered(elements):
            run.averages.append(stepped(run, slot, start, stop, (key.quantity, op.decay)))
        new = FlatKey(EMA, key.flat, 1)
        written.append((a, b, Elements(new, updated.shift, updated.strides)))
    run.memory.write(op.average, written)
