"""A schedule against its logical program: the same contributions, the same loss, the same settings of the update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.contents import Content, NamedContent
from zeroir.ir.effects import effects
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.verify.contracts import Layout
from zeroir.ir.verify.domain import Elements, NamedKey, Zero
from zeroir.ir.verify.interpreter import Outcome

Outcomes = Mapping[str, Outcome]


class Difference(NamedTuple):
    """What differs, in which section (None: in the program), the op to look at, and what to do."""

    sentence: str
    section: str | None = None
    line: int | None = None
    advice: str = ""


def differences(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[Difference]:
    """Where the program computes something else than the reference."""
    found = _bindings(program, reference)
    names = {s.name for flat in program.flats for s in flat.slots if flat.is_trainable}
    others = {s.name for flat in reference.flats for s in flat.slots if flat.is_trainable}
    found += [
        Difference(f"parameter {name} is trained in one of the two programs only")
        for name in sorted(names ^ others)
    ]
    for section in reference.section_by_name:
        if section not in outcomes:
            found.append(Difference(f"section {section} of the logical program is missing"))
            continue
        mine, theirs = outcomes[section], wanted[section]
        for name in sorted({*mine.contributions, *theirs.contributions}):
            one, other = (o.contributions.get(name, []) for o in (mine, theirs))
            if _in_order(one) == _in_order(other):
                continue
            is_order = sorted(one) == sorted(other)
            found.append(
                Difference(
                    f"the contributions to the gradient of {name} are added in another order than in the "
                    "logical program"
                    if is_order
                    else f"the gradient of {name} is not made of the values of the logical program",
                    section,
                    contributor(program, section, name),
                )
            )
        found += [
            Difference(
                f"the gradient of flat {flat} passes through {dtype}, which it does not in the logical program",
                section,
                line,
                f"Let gradients of flat {flat} travel and stay in the dtype that the logical program gives them.",
            )
            for (flat, dtype), line in mine.roundings.items()
            if (flat, dtype) not in theirs.roundings
        ]
    found += _scalars(program, outcomes, reference, wanted)
    found += _settings(program, outcomes, reference, wanted)
    return found


def _in_order(contributions: list[int]) -> list[int]:
    """Contributions in the order that matters: sums of two are the same either way, longer ones round differently."""
    return [*sorted(contributions[:2]), *contributions[2:]]


_CHANGE_BOTH = "Change the logical program, and lower it again."


def _bindings(program: Program, reference: Program) -> list[Difference]:
    """What comes from outside: inputs, module buffers and constants, first values of scalars."""

    def held(owner: Program, name: str) -> Content | None:
        buffer = owner.buffer_by_name.get(name)
        return None if buffer is None else buffer.holds

    found: list[Difference] = []
    theirs = {b.path: (held(reference, b.buffer), b.dtype, b.shape) for b in reference.inputs}
    mine = {b.path: (held(program, b.buffer), b.dtype, b.shape) for b in program.inputs}
    found += [
        Difference(
            f"input {path} is bound to another value than in the logical program",
            advice=_CHANGE_BOTH,
        )
        for path in sorted({*mine, *theirs})
        if mine.get(path) != theirs.get(path)
    ]
    buffers = {
        b.name: (held(reference, b.buffer), b.shape, b.data) for b in reference.module_buffers
    }
    own = {b.name: (held(program, b.buffer), b.shape, b.data) for b in program.module_buffers}
    found += [
        Difference(
            f"module buffer {name} is bound to another value than in the logical program",
            advice=_CHANGE_BOTH,
        )
        for name in sorted({*own, *buffers})
        if own.get(name) != buffers.get(name)
    ]
    first = {b.buffer: b.values for b in program.scalars}
    found += [
        Difference(
            f"%{b.buffer} begins with another value than in the logical program",
            advice=_CHANGE_BOTH,
        )
        for b in reference.scalars
        if first.get(b.buffer) != b.values
    ]
    return found


def contributor(program: Program, section: str, name: str) -> int | None:
    """The first op of the section that contributes to the gradient of a parameter."""
    home = program.parameter_by_name.get(name)
    for line, op in enumerate(program.section_by_name[section].body):
        if not isinstance(op, ops.Compute):
            continue
        for destination in op.destinations:
            if destination is None or destination.gradient is None:
                continue
            if program.parameter_by_name.get(destination.gradient) == home:
                return line
    return None


def _scalars(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[Difference]:
    found: list[Difference] = []
    if program.loss != reference.loss:
        found.append(Difference("the loss stands in another buffer than in the logical program"))
    named = [b.name for b in reference.buffers if isinstance(b.holds, NamedContent)]
    decided = {
        region.buffer
        for op in reference.ops()
        if isinstance(op, ops.Decide)
        for region in effects(op).writes + effects(op).accumulates
    }

    def untouched(name: str) -> Hashable:
        buffer = reference.buffer_by_name[name]
        assert isinstance(buffer.holds, NamedContent)
        key = NamedKey(buffer.holds.name, buffer.holds.version)
        return ((0, buffer.numel, key, 0),)

    for section in reference.section_by_name:
        if section not in outcomes:
            continue
        for name in named:
            if name not in program.buffer_by_name:
                found.append(Difference(f"%{name} of the logical program is missing", section))
                continue
            if name in decided and section == LAST_MICRO_STEP:
                continue  # A decision may be taken early: what it leaves is compared after the update.
            mine = content(outcomes[section], whole(program.buffer_by_name[name]))
            theirs = content(wanted[section], whole(reference.buffer_by_name[name]))
            is_early = section == UPDATE and name in decided and mine == untouched(name)
            if is_early and LAST_MICRO_STEP in outcomes:
                mine = content(outcomes[LAST_MICRO_STEP], whole(program.buffer_by_name[name]))
            if mine != theirs:
                what = "the loss" if name == reference.loss else f"%{name}"
                found.append(Difference(f"{what} is not the value of the logical program", section))
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


def _settings(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[Difference]:
    """What decisions, loss scaling and the steps of each parameter are told, wherever that stands."""
    found: list[Difference] = []
    told = {key for outcome in wanted.values() for key in outcome.settings}
    for name, outcome in outcomes.items():
        found += [
            Difference(
                "the update is told something else than in the logical program",
                name,
                line,
                _CHANGE_BOTH,
            )
            for key, line in outcome.settings.items()
            if key not in told
        ]
    if not found and told - {key for outcome in outcomes.values() for key in outcome.settings}:
        found.append(
            Difference(
                "the update lacks a decision or a loss scaling of the logical program", UPDATE
            )
        )
    mine, theirs = _steps(program, outcomes), _steps(reference, wanted)
    for parameter in sorted({*mine, *theirs}):
        one, other = mine.get(parameter, []), theirs.get(parameter, [])
        if [item[:3] for item in one] == [item[:3] for item in other]:
            continue
        section, line = one[0][3] if one else (UPDATE, None)
        found.append(
            Difference(
                f"{parameter} is updated by another algorithm or other hyper-parameters than in the logical program",
                section,
                line,
                _CHANGE_BOTH,
            )
        )
    return found


_Step = tuple[int, int, Hashable, tuple[str, int]]
"""Elements ``[start, stop)`` of a parameter, the setting of their step, and where it is."""


def _steps(program: Program, outcomes: Outcomes) -> dict[str, list[_Step]]:
    """Per parameter its optimizer steps, in the order of its elements."""
    layout = Layout(program)
    found: dict[str, list[_Step]] = {}
    for section, outcome in outcomes.items():
        for step in outcome.steps:
            for start, stop in step.elements.intervals(layout.sizes):
                for a, b, slot in layout.between(step.elements.flat, start, stop):
                    if slot is not None:
                        place = (a - slot.offset, b - slot.offset)
                        found.setdefault(slot.name, []).append(
                            (*place, step.setting, (section, step.line))
                        )
    return {name: _joined(sorted(steps, key=lambda s: s[:2])) for name, steps in found.items()}


def _joined(steps: list[_Step]) -> list[_Step]:
    """Adjoining steps that are told the same as one."""
    found: list[_Step] = []
    for start, stop, setting, place in steps:
        if found and found[-1][1] == start and found[-1][2] == setting:
            found[-1] = (found[-1][0], stop, setting, found[-1][3])
        else:
            found.append((start, stop, setting, place))
    return found
