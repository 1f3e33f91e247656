"""A schedule against its logical program: the same contributions, the same loss, the same settings of the update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.program import Program
from zeroir.ir.verify.domain import Elements, Zero
from zeroir.ir.verify.interpreter import Outcome

Outcomes = Mapping[str, Outcome]


def differences(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[tuple[str, str | None]]:
    """Sentences and sections in which the program computes something else than the reference."""
    found: list[tuple[str, str | None]] = []
    names = {s.name for flat in program.flats for s in flat.slots if flat.is_trainable}
    others = {s.name for flat in reference.flats for s in flat.slots if flat.is_trainable}
    found += [
        (f"parameter {name} is trained in one of the two programs only", None)
        for name in sorted(names ^ others)
    ]
    for section in reference.section_by_name:
        if section not in outcomes:
            found.append((f"section {section} of the logical program is missing", None))
            continue
        mine, theirs = outcomes[section].contributions, wanted[section].contributions
        found += [
            (f"the gradient of {name} is not made of the values of the logical program", section)
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
    found += _scalars(program, outcomes, reference, wanted)
    return found


def _scalars(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    if program.loss != reference.loss:
        found.append(("the loss stands in another buffer than in the logical program", None))
    named = [b.name for b in reference.buffers if isinstance(b.holds, NamedContent)]
    for section in reference.section_by_name:
        if section not in outcomes:
            continue
        for name in named:
            if name not in program.buffer_by_name:
                found.append((f"%{name} of the logical program is missing", section))
                continue
            mine = content(outcomes[section], whole(program.buffer_by_name[name]))
            theirs = content(wanted[section], whole(reference.buffer_by_name[name]))
            if mine != theirs:
                what = "the loss" if name == reference.loss else f"%{name}"
                found.append((f"{what} is not the value of the logical program", section))
    return found


def content(outcome: Outcome, region: Region) -> Hashable:
    """What a scalar holds, whatever it was summed over; statistics and decisions only by kind."""
    found: list[Hashable] = []
    for a, b, value in outcome.memory.read(region):
        match value:
            case Elements():
                found.append((a, b, value.key, value.shift))
            case Zero():
                found.append((a, b, "zero"))
            case _:
                found.append((a, b, type(value).__name__))
    return tuple(found)


def settings(program: Program) -> set[Hashable]:
    """What the update is told, independent of sharding."""
    found: set[Hashable] = set()
    for op in program.ops():
        match op:
            case ops.Decide():
                given = tuple(
                    None if r is None else r.buffer
                    for r in (
                        op.step,
                        op.gradient_divisor,
                        op.overflow,
                        op.norm,
                        op.loss_scale,
                        op.skip,
                    )
                )
                found.add(("decide", given, op.max_norm))
            case ops.OptimizerStep():
                found.add(("step", op.algorithm, op.lr, op.hyper, op.group))
            case ops.UpdateScale():
                found.add(("scale", op.state, op.window, op.factor, op.hysteresis, op.minimum))
            case _:
                pass
    return found
