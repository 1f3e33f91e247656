"""Ops that are pending at a boundary between two sections: the op that signals each pending event.

Several ops may signal an event of one name, each in another section. Which of them is pending when a section starts
depends on the sections that ran before it, so a section is checked once for each possibility.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    UPDATE,
    Program,
    Section,
)

SECTION_BOUNDARIES = (
    (MICRO_STEP, MICRO_STEP),
    (MICRO_STEP, LAST_MICRO_STEP),
    (LAST_MICRO_STEP, UPDATE),
    (UPDATE, MICRO_STEP),
    (UPDATE, LAST_MICRO_STEP),
    (UPDATE, EVALUATE),
    (EVALUATE, EVALUATE),
    (EVALUATE, MICRO_STEP),
    (EVALUATE, LAST_MICRO_STEP),
    (MICRO_STEP, SAVE),
    (UPDATE, SAVE),
    (EVALUATE, SAVE),
    (SAVE, SAVE),
    (SAVE, MICRO_STEP),
    (SAVE, LAST_MICRO_STEP),
    (SAVE, EVALUATE),
)
"""Pairs of sections that may follow each other."""


class Carried(NamedTuple):
    """An op that is pending at a boundary: the section that issued it, its line there, the op and its effects."""

    section: str
    line: int
    op: Op
    effects: Effects


PendingOps = Mapping[str, Carried]
"""The pending ops, by the event that each signals when it is done."""

_Way = frozenset[tuple[str, str, int]]


def pending_ops_at_entry(program: Program) -> Mapping[str, Sequence[PendingOps]]:
    """Return the ops that may be pending at the entry of each section: every possibility, at least one for each.

    Before the first step nothing is pending. A possibility that is a subset of another one leaves fewer ops unordered,
    so it is omitted.
    """
    sections = program.section_by_name
    signalled = {section.name: _signalled(section) for section in program.sections}
    # Crossings in a form that can be compared: each event with the section and line of its op.
    ways_into: dict[str, set[_Way]] = {name: set() for name in sections}
    entries: list[tuple[str, _Way]] = [(name, frozenset()) for name in sections]
    while entries:
        name, entry = entries.pop()
        before = {event: (section, line) for event, section, line in entry}
        here = before | {event: (name, line) for event, line in signalled[name].items()}
        pending = [p.event for p in sections[name].exit.pending]
        leaving = frozenset((event, *here[event]) for event in pending if event in here)
        for first, second in SECTION_BOUNDARIES:
            if first == name and second in sections and leaving not in ways_into[second]:
                ways_into[second].add(leaving)
                entries.append((second, leaving))
    return {
        name: [
            {event: _carried(sections[section], line) for event, section, line in sorted(way)}
            for way in sorted(ways, key=sorted)
            if not any(way < longer for longer in ways)
        ]
        or [{}]
        for name, ways in ways_into.items()
    }


def _signalled(section: Section) -> dict[str, int]:
    """Return the line of the last op that signals each event."""
    return {event: line for line, op in enumerate(section.body) for event in effects(op).signals}


def _carried(section: Section, line: int) -> Carried:
    op = section.body[line]
    return Carried(section.name, line, op, effects(op))
