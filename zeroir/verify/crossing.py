"""Ops that are under way at a joint between two sections: which op each pending event stands for.

An event has a name, and the same name may stand for one op when a step begins and for another within it. Which one it
is depends on the section that ran before, so each way to come to a section is told apart and examined by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zeroir.ir.effects import Effects, effects
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Program,
    Section,
)

JOINTS = (
    (MICRO_STEP, MICRO_STEP),
    (MICRO_STEP, LAST_MICRO_STEP),
    (LAST_MICRO_STEP, UPDATE),
    (UPDATE, MICRO_STEP),
    (UPDATE, LAST_MICRO_STEP),
    (UPDATE, EVALUATE),
    (EVALUATE, EVALUATE),
    (EVALUATE, MICRO_STEP),
    (EVALUATE, LAST_MICRO_STEP),
)
"""Sections that may follow each other."""


class Carried(NamedTuple):
    """An op that is under way at a joint: the section that issued it, its line there, the op and its effects."""

    section: str
    line: int
    op: Op
    effects: Effects


Crossing = Mapping[str, Carried]
"""What is under way, by the event that tells when it is done."""

_Way = frozenset[tuple[str, str, int]]


def crossings(program: Program) -> Mapping[str, Sequence[Crossing]]:
    """Everything that may be under way at the entry of each section, at least one crossing for each.

    Before the first step nothing is under way. A crossing that is part of another one orders more, and so it is left
    out.
    """
    sections = program.section_by_name
    signalled = {section.name: _signalled(section) for section in program.sections}
    # A crossing as data that can be compared: events with the section and line of their ops.
    found: dict[str, set[_Way]] = {name: set() for name in sections}
    entries: list[tuple[str, _Way]] = [(name, frozenset()) for name in sections]
    while entries:
        name, entry = entries.pop()
        before = {event: (section, line) for event, section, line in entry}
        here = before | {event: (name, line) for event, line in signalled[name].items()}
        pending = [p.event for p in sections[name].exit.pending]
        leaving = frozenset((event, *here[event]) for event in pending if event in here)
        for first, second in JOINTS:
            if first == name and second in sections and leaving not in found[second]:
                found[second].add(leaving)
                entries.append((second, leaving))
    return {
        name: [
            {event: _carried(sections[section], line) for event, section, line in sorted(way)}
            for way in sorted(ways, key=sorted)
            if not any(way < other for other in ways)
        ]
        or [{}]
        for name, ways in found.items()
    }


def _signalled(section: Section) -> dict[str, int]:
    """The lines of the ops that signal each event."""
    return {event: line for line, op in enumerate(section.body) for event in effects(op).signals}


def _carried(section: Section, line: int) -> Carried:
    op = section.body[line]
    return Carried(section.name, line, op, effects(op))
