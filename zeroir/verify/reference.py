"""A schedule against its logical program: the same contributions, the same loss, the same settings of the update."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role, whole
from zeroir.ir.contents import Content, NamedContent
from zeroir.ir.effects import effects
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.verify.domain import Elements, Zero
from zeroir.verify.flat_layout import FlatLayout
from zeroir.verify.interpreter import SectionOutcome
from zeroir.verify.update import NORM_ORDER

Outcomes = Mapping[str, SectionOutcome]


class Mismatch(NamedTuple):
    """What differs, in which section (None: in the program), the op to look at, and what to do."""

    sentence: str
    section: str | None = None
    line: int | None = None
    advice: str = ""


def mismatches(
    program: Program, outcomes: Outcomes, reference: Program, wanted: Outcomes
) -> list[Mismatch]:
    """Where the program computes something else than the reference."""
    found = [*_header(program, reference), *_bindings(program, reference)]
    for section in reference.section_by_name:
        if section not in outcomes:
            found.append(Mismatch(f"section {section} of the logical program is missing"))
            continue
        mine, theirs = outcomes[section], wanted[section]
        for name in sorted({*mine.contributions, *theirs.contributions}):
            one, other = (o.contributions.get(name, []) for o in (mine, theirs))
            if sorted(one) != sorted(other):
                found.append(
                    Mismatch(
                        f"the gradient of {name} is not made of the values of the logical program",
                        section,
                        contributor(program, section, name),
                    )
                )
        found += [
            Mismatch(
                f"the gradient of flat {flat} passes through {dtype}, which it does not in the logical program",
                section,
                line,
                f"Let gradients of flat {flat} travel and stay in the dtype that the logical program gives them.",
            )
            for (flat, dtype), line in mine.roundings.items()
            if (flat, dtype) not in theirs.roundings
        ]
    sums = {added for outcome in wanted.values() for added in outcome.sums}
    found += [
        Mismatch(
            f"contributions to the gradient of flat {added.flat} are added in {added.dtype}, in another order or "
            "dtype than in the logical program: that rounds otherwise",
            section,
            line,
            "Add the same to the same, in the same dtype, as the logical program does.",
        )
        for section, outcome in outcomes.items()
        for added, line in outcome.sums.items()
        if added not in sums
    ]
    found += _scalars(program, outcomes, reference, wanted)
    found += _settings(program, outcomes, reference, wanted)
    return found


def _header(program: Program, reference: Program) -> Iterator[Mismatch]:
    """What the header says of parameters and steps; how long flats are and what pads them is a schedule's affair."""
    mine, theirs = ({flat.name: flat for flat in p.flats} for p in (program, reference))
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None:
            yield Mismatch(f"flat {name} is in one of the two programs only")
        elif one != replace(other, padded_numel=one.padded_numel):
            yield Mismatch(
                f"flat {name} has other parameters, places or another dtype than in the logical program",
                advice=_CHANGE_BOTH,
            )
    counts = [p.option.get("micro_steps", "1") for p in (program, reference)]
    if counts[0] != counts[1]:
        yield Mismatch(
            f"a step has {counts[0]} micro-steps, in the logical program {counts[1]}",
            advice=_CHANGE_BOTH,
        )
    seeds = [
        {(b.holds, b.numel) for b in p.buffers if b.role is Role.RNG} for p in (program, reference)
    ]
    if seeds[0] != seeds[1]:
        yield Mismatch("seeds are drawn for other places than in the logical program")


_CHANGE_BOTH = "Change the logical program, and lower it again."


def _bindings(program: Program, reference: Program) -> list[Mismatch]:
    """What comes from outside: inputs, module buffers and constants, first values of scalars."""

    def held(owner: Program, name: str) -> Content | None:
        buffer = owner.buffer_by_name.get(name)
        return None if buffer is None else buffer.holds

    found: list[Mismatch] = []
    theirs = {b.path: (held(reference, b.buffer), b.dtype, b.shape) for b in reference.inputs}
    mine = {b.path: (held(program, b.buffer), b.dtype, b.shape) for b in program.inputs}
    found += [
        Mismatch(
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
        Mismatch(
            f"module buffer {name} is bound to another value than in the logical program",
            advice=_CHANGE_BOTH,
        )
        for name in sorted({*own, *buffers})
        if own.get(name) != buffers.get(name)
    ]
    first, expected = ({b.buffer: b.values for b in p.scalars} for p in (program, reference))
    # Scalars that nobody gives a value begin with zeros.
    found += [
        Mismatch(
            f"%{name} begins with another value than in the logical program",
            advice=_CHANGE_BOTH,
        )
        for name in sorted({*first, *expected})
        if name in reference.buffer_by_name
        and any(first.get(name, ())) | any(expected.get(name, ()))
        and first.get(name) != expected.get(name)
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
) -> list[Mismatch]:
    found: list[Mismatch] = []
    if program.loss != reference.loss:
        found.append(Mismatch("the loss stands in another buffer than in the logical program"))
    named = [b.name for b in reference.buffers if isinstance(b.holds, NamedContent)]
    decided = {
        region.buffer
        for op in reference.ops()
        if isinstance(op, ops.GradNorm | ops.CheckFinite | ops.Decide)
        for region in effects(op).writes + effects(op).accumulates
    }
    for section in reference.section_by_name:
        if section not in outcomes:
            continue
        for name in named:
            if name not in program.buffer_by_name:
                found.append(Mismatch(f"%{name} of the logical program is missing", section))
                continue
            if name in decided and section == LAST_MICRO_STEP:
                continue  # A decision may be taken early: what it leaves is compared after the update.
            mine = content(outcomes[section], whole(program.buffer_by_name[name]))
            theirs = content(wanted[section], whole(reference.buffer_by_name[name]))
            if mine != theirs:
                what = "the loss" if name == reference.loss else f"%{name}"
                found.append(Mismatch(f"{what} is not the value of the logical program", section))
    return found


def content(outcome: SectionOutcome, region: Region) -> Hashable:
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
) -> list[Mismatch]:
    """What decisions, loss scaling and the steps of each parameter are told, wherever that stands."""
    found: list[Mismatch] = []
    told = {key for outcome in wanted.values() for key in outcome.settings}
    for name, outcome in outcomes.items():
        found += [
            Mismatch(
                "the norm adds up gradients in another order than in the logical program: that rounds otherwise"
                if key[0] == NORM_ORDER
                else "the update is told something else than in the logical program",
                name,
                line,
                _CHANGE_BOTH,
            )
            for key, line in outcome.settings.items()
            if key not in told
        ]
    if not found and told - {key for outcome in outcomes.values() for key in outcome.settings}:
        found.append(
            Mismatch("the update lacks a decision or a loss scaling of the logical program", UPDATE)
        )
    mine, theirs = _steps(program, outcomes), _steps(reference, wanted)
    for parameter in sorted({*mine, *theirs}):
        one, other = mine.get(parameter, []), theirs.get(parameter, [])
        if [item[:3] for item in one] == [item[:3] for item in other]:
            continue
        section, line = one[0][3] if one else (UPDATE, None)
        found.append(
            Mismatch(
                f"{parameter} is updated by another algorithm or other hyper-parameters than in the logical program",
                section,
                line,
                _CHANGE_BOTH,
            )
        )
    return found


_ParameterStep = tuple[int, int, Hashable, tuple[str, int]]
"""Elements ``[start, stop)`` of a parameter, the setting of their step, and where it is."""


def _steps(program: Program, outcomes: Outcomes) -> dict[str, list[_ParameterStep]]:
    """Per parameter its optimizer steps, in the order of its elements."""
    layout = FlatLayout(program)
    found: dict[str, list[_ParameterStep]] = {}
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


def _joined(steps: list[_ParameterStep]) -> list[_ParameterStep]:
    """Adjoining steps that are told the same as one."""
    found: list[_ParameterStep] = []
    for start, stop, setting, place in steps:
        if found and found[-1][1] == start and found[-1][2] == setting:
            found[-1] = (found[-1][0], stop, setting, found[-1][3])
        else:
            found.append((start, stop, setting, place))
    return found
